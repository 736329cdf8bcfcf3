"""A fuzzer of the public functions: calls of every kind, judged in extended precision.

`cases` makes call number i of a seed, `oracle` knows what it should give and how far the promises let it be
off, `checks` compares, and `runner` goes through many calls and remembers where it was. From the root of the
repository:

    python -m tests.fuzz                      # 100,000 calls; Ctrl-C and the same command again continue
    python -m tests.fuzz --seed 1 --case 17   # one call, described
"""

"""What each instruction does, by family. A family is a table: from the name to a function that decodes an
instruction of that name into a function of the threads, once for each kernel.

A form that is not in these files is refused by name, never guessed.
"""

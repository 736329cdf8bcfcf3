"""One file per objective over many tuples: hand-worked tests, its peer, and how far rounding may move it."""

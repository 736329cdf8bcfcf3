"""The reference trainer: the papers' experiments, run with the public surface of tripletops."""

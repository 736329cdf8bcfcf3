"""Reference training on the public surface of tripletops; for now what the demo needs."""

"""Measurements of tripletops beside plain PyTorch: `python -m bench core`."""

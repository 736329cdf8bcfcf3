"""Measurements of tripletops beside plain PyTorch: `python -m bench core`, `python -m bench dense`."""

"""Experiments that are computed, not trained: the numeric figures and theorems of the papers."""

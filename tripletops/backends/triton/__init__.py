"""The ops on Triton's kernels: for GPU tensors, or for CPU tensors under Triton's interpreter.

The arguments are those of the schemas in `ops.py`. No result has a shape that depends on values, and nothing
waits for the device, but for objectives over all positives: they read the size of the largest class.
"""

from __future__ import annotations

from tripletops.backends.triton.triplets import mine, triplet_backward, triplet_forward
from tripletops.backends.triton.tuples import tuples_backward, tuples_forward

__all__ = ["mine", "triplet_backward", "triplet_forward", "tuples_backward", "tuples_forward"]

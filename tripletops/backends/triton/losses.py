"""The losses of one triplet, a device function for each word: the value and its derivatives by d_ap and d_an.

Everything is float64. `numbers` are pointers to the numbers of the call. Under the cosine, S = 1 − d.
"""

import triton
import triton.language as tl

from tripletops.backends.triton.device import logistic, softplus


@triton.jit
def softplus_term(z, z_ap, z_an):
    """softplus(z), given z and its derivatives."""
    sigma = logistic(z)
    return softplus(z), sigma * z_ap, sigma * z_an


@triton.jit
def margin(d_ap, d_an, numbers):
    z = d_ap - d_an + tl.load(numbers.margin)
    slope = tl.where(z > 0, 1.0, 0.0).to(tl.float64)
    return tl.where(z < 0, 0.0, z), slope, -slope  # NaN stays NaN


@triton.jit
def soft_margin(d_ap, d_an, numbers):
    one = tl.full(d_ap.shape, 1.0, tl.float64)
    return softplus_term(d_ap - d_an, one, -one)


@triton.jit
def first_order(d_ap, d_an, numbers):
    temperature = tl.load(numbers.temperature)
    rate = tl.zeros_like(d_ap) + 1.0 / temperature
    return softplus_term((d_ap - d_an) / temperature, rate, -rate)


@triton.jit
def second_order(d_ap, d_an, numbers):
    """Equation 16 of "Extreme Triplet Learning": the weights of the pairs are 1 − S_ap and S_an."""
    temperature = tl.load(numbers.temperature)
    s_ap, s_an = 1.0 - d_ap, 1.0 - d_an
    z = (0.5 * s_an * s_an - s_ap + 0.5 * s_ap * s_ap) / temperature
    return softplus_term(z, d_ap / temperature, -s_an / temperature)


@triton.jit
def sct(d_ap, d_an, numbers):
    """Where the negative is more similar than the positive, it is pushed away alone."""
    loss, slope_ap, slope_an = first_order(d_ap, d_an, numbers)
    weight = tl.zeros_like(d_ap) + tl.load(numbers.sct_weight)
    alone = d_an < d_ap
    loss = tl.where(alone, weight * (1.0 - d_an), loss)
    return loss, tl.where(alone, 0.0, slope_ap), tl.where(alone, -weight, slope_an)

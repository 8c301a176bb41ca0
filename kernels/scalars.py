"""Numbers that a launch takes: float64 arguments, limits and loss scales, and the coefficient.

A number travels as the bits of a float64, because launchers round floats to float32. A limit or a
loss scale may also be a tensor on the device, for which the host does not wait.
"""

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))


@triton.jit
def as_float64(bits):
    """A float64 argument from its bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def load_number(number_ptr, number_bits, place):
    """A number in float64: number_ptr[place] if there is a tensor, else the argument."""
    if number_ptr is not None:
        number = tl.load(number_ptr + place).to(tl.float64)
    else:
        number = as_float64(number_bits)
    return number


@triton.jit
def divide(a, b):
    """Returns a / b, rounded as IEEE 754 asks, for two float32 or two float64."""
    if a.dtype == tl.float64:
        quotient = a / b
    else:
        quotient = tl.div_rn(a, b)
    return quotient


@triton.jit
def coefficient_of(norm, max_norm, eps):
    """Returns min(1, max_norm / (norm + eps)) in the dtype of norm.

    It is 1 if norm + eps is 0, and for an infinite limit; NaN stays.
    """
    bound = norm + eps
    ratio = divide(max_norm, bound)
    keep = (ratio > 1) | (bound == 0) | ((max_norm == INF) & (norm == norm))
    return tl.where(keep, 1.0, ratio)


@triton.jit
def unit_coefficient_of(norm, weight, ratio, eps, RESULT: tl.constexpr):
    """Returns min(1, ratio * max(weight, eps) / norm), computed in float64; NaN stays."""
    floor = tl.where(weight < eps, eps, weight)
    limit = tl.where(weight == INF, INF, ratio * floor)
    limit = tl.where(ratio == INF, INF, limit)
    return coefficient_of(norm, limit, 0.0).to(RESULT)


@triton.jit
def is_finite(x):
    """Whether x is neither NaN nor inf."""
    return (x == x) & (tl.abs(x) != INF)

"""Adaptive: one launch of one program advances the state of a rule by a norm, and leaves its limit.

The norm is added up from partial norms as `scale` does it, and rounded as its result, so that both
see the same norm. State and limit are float64. In operators the same takes some 40 calls.

A quantile is found by counting: no sort, no other memory, and any window. The bits of positive
numbers are ordered as they are, so that each round halves the interval of bits that holds the k-th
smallest norm, and then moves an end to a norm of the window: some 12 rounds for 1000 norms that are
drawn at random, 63 at most.

The state after may be the state before, written in place: a barrier lies between all loads of
numbers that other threads store and the first store.
"""

import triton
import triton.language as tl

from tritonclip.kernels import launch
from tritonclip.kernels.access import key_magnitude, magnitude_key
from tritonclip.kernels.norm import combine
from tritonclip.kernels.scalars import INF, as_float64, is_finite, load_number

# Norms of a window, or rows of a state, at a time: 4 for each of 256 threads, and at least one for
# each of the 512 on gfx942.
BLOCK = 1024
# Added to a deviation by the z-score, and relative to the mean the least one of an outlier; as in
# `rules`.
LEAST_DEVIATION = tl.constexpr(1e-6)
# The keys of inf, and of an empty slot, which is NaN.
_KEY_OF_INF = tl.constexpr(0x7FF0000000000000)
_KEY_OF_NONE = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def _counts(norm):
    """Whether a norm may enter a state."""
    return is_finite(norm) & (norm > 0)


@triton.jit
def _least(a, b):
    """The lesser of two numbers; NaN wins."""
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def _zscore(norm, mean, variance, n, threshold, decay, warmup):
    """Limit, mean and variance after a norm that counts."""
    warm = n >= warmup
    deviation = tl.sqrt(variance)
    z = (norm - mean) / (deviation + LEAST_DEVIATION)
    reduced = mean + threshold * deviation * (threshold / z)
    limit = tl.where(warm & (z > threshold), reduced, INF)

    value = _least(norm, limit)
    moved = value - mean
    # Welford's update during the warm-up.
    plain_mean = mean + moved / (n + 1)
    plain_variance = (variance * n + moved * (value - plain_mean)) / (n + 1)
    moving_mean = decay * mean + (1 - decay) * value
    rest = value - moving_mean
    moving_variance = decay * variance + (1 - decay) * (rest * rest)
    mean = tl.where(warm, moving_mean, plain_mean)
    return limit, mean, tl.where(warm, moving_variance, plain_variance)


@triton.jit
def _slots(state_ptr, start, window, slot, norm, BLOCK: tl.constexpr):
    """BLOCK slots of a window from `start` on, with the norm in its slot; NaN where one is empty.

    A slot of -1 is none.
    """
    offsets = start + tl.arange(0, BLOCK)
    x = tl.load(state_ptr + offsets, mask=offsets < window, other=float("nan"))
    return tl.where(offsets == slot, norm, x)


@triton.jit
def _n_known(state_ptr, window, slot, norm, BLOCK: tl.constexpr):
    """The number of norms in a window."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, window, BLOCK):
        x = _slots(state_ptr, start, window, slot, norm, BLOCK)
        counts += (x == x).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def _divide_keys(state_ptr, window, slot, norm, middle, BLOCK: tl.constexpr):
    """The number of keys up to `middle`, the largest of these, and the least of the others."""
    n = tl.zeros([BLOCK], tl.int32)
    below = tl.zeros([BLOCK], tl.int64)
    above = tl.full([BLOCK], _KEY_OF_NONE, tl.int64)
    for start in range(0, window, BLOCK):
        x = _slots(state_ptr, start, window, slot, norm, BLOCK)
        keys = tl.where(x == x, magnitude_key(x), _KEY_OF_NONE)
        n += (keys <= middle).to(tl.int32)
        below = tl.where(keys <= middle, tl.maximum(below, keys), below)
        above = tl.where(keys <= middle, above, tl.minimum(above, keys))
    return tl.sum(n, axis=0), tl.max(below, axis=0), tl.min(above, axis=0)


@triton.jit
def _quantile(state_ptr, window, slot, norm, q, BLOCK: tl.constexpr):
    """The quantile of the known norms, interpolated as torch.quantile does it; inf of none."""
    n = _n_known(state_ptr, window, slot, norm, BLOCK)
    rank = q * (n - 1).to(tl.float64)
    k = rank.to(tl.int32)
    weight = rank - k.to(tl.float64)

    low = tl.full([], 0, tl.int64)
    high = tl.full([], _KEY_OF_INF, tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        n_below, below, above = _divide_keys(state_ptr, window, slot, norm, middle, BLOCK)
        high = tl.where(n_below > k, below, high)
        low = tl.where(n_below > k, low, above)
    n_below, _, above = _divide_keys(state_ptr, window, slot, norm, low, BLOCK)
    next_key = tl.where((n_below > k + 1) | (k + 1 >= n), low, above)

    a = key_magnitude(low)
    b = key_magnitude(next_key)
    limit = tl.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))
    return tl.where(n > 0, limit, INF)


@triton.jit
def _outlier(state_ptr, window, sigmas, BLOCK: tl.constexpr):
    """Mean and `sigmas` sample deviations of the known norms; inf before half the window."""
    # No slot is replaced: a norm is judged by those before it.
    none = tl.full([], -1, tl.int32)
    n = _n_known(state_ptr, window, none, 0.0, BLOCK).to(tl.float64)
    lanes = tl.zeros([BLOCK], tl.float64)
    for start in range(0, window, BLOCK):
        x = _slots(state_ptr, start, window, none, 0.0, BLOCK)
        lanes += tl.where(x == x, x, 0.0)
    mean = tl.sum(lanes, axis=0) / n

    lanes = tl.zeros([BLOCK], tl.float64)
    for start in range(0, window, BLOCK):
        x = _slots(state_ptr, start, window, none, 0.0, BLOCK)
        moved = tl.where(x == x, x - mean, 0.0)
        lanes += moved * moved
    deviation = tl.sqrt(tl.sum(lanes, axis=0) / (n - 1))
    least = LEAST_DEVIATION * tl.abs(mean)
    limit = mean + sigmas * tl.where(deviation > least, deviation, least)
    return tl.where(n >= (window // 2).to(tl.float64), limit, INF)


@launch.jit
def advance_kernel(
    norms_ptr,
    state_ptr,
    after_ptr,
    limit_ptr,
    grad_scale_ptr,
    n_norms: tl.int32,
    window: tl.int32,
    max_norm_bits: tl.int64,
    a_bits: tl.int64,
    grad_scale_bits: tl.int64,
    b_bits: tl.int64,
    c_bits: tl.int64,
    RULE: tl.constexpr,
    P: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The only program advances a state by one norm, and writes the limit.

    RULE "zscore": a, b, c are threshold, decay and warm-up, and the state is mean, variance and
    number of norms. "quantile": a is the quantile; "outlier": the distance in deviations. Their
    state is a window, NaN where a slot is empty, and the number of norms. "loss": as "outlier", for
    one number of any sign in place of the norms.

    norms_ptr: float32 or float64 [n_norms]; state_ptr, after_ptr: float64[window + 1], one memory
    or two; limit_ptr: float64[1]; grad_scale_ptr: any float [1], or None. DTYPE is that of the
    norm's result.
    """
    grad_scale = load_number(grad_scale_ptr, grad_scale_bits, 0)
    max_norm = as_float64(max_norm_bits)
    a = as_float64(a_bits)
    count = tl.load(state_ptr + window)
    if RULE == "loss":
        norm = tl.load(norms_ptr).to(tl.float64)
        counts = is_finite(norm)
    else:
        norm = combine(norms_ptr, 0, n_norms, P)
        # A count of elements carries no loss scale.
        if P != 0.0:
            norm /= grad_scale
        norm = norm.to(DTYPE).to(tl.float64)
        counts = _counts(norm)
    count_after = tl.where(counts, count + 1, count)

    if RULE == "zscore":
        mean = tl.load(state_ptr)
        variance = tl.load(state_ptr + 1)
        limit, mean_after, variance_after = _zscore(
            norm, mean, variance, count, a, as_float64(b_bits), as_float64(c_bits)
        )
        tl.debug_barrier()
        tl.store(after_ptr, tl.where(counts, mean_after, mean))
        tl.store(after_ptr + 1, tl.where(counts, variance_after, variance))
    else:
        slot = tl.where(counts, (count.to(tl.int64) % window).to(tl.int32), -1)
        if RULE == "quantile":
            limit = _quantile(state_ptr, window, slot, norm, a, BLOCK)
        else:
            limit = _outlier(state_ptr, window, a, BLOCK)
        tl.debug_barrier()
        for start in range(0, window, BLOCK):
            x = _slots(state_ptr, start, window, slot, norm, BLOCK)
            offsets = start + tl.arange(0, BLOCK)
            tl.store(after_ptr + offsets, x, mask=offsets < window)
    tl.store(after_ptr + window, count_after)
    tl.store(limit_ptr, _least(max_norm, limit))


@launch.jit
def advance_each_kernel(
    norms_ptr,
    rows_ptr,
    state_ptr,
    after_ptr,
    limits_ptr,
    n_norms: tl.int32,
    max_norm_bits: tl.int64,
    ratio_bits: tl.int64,
    decay_bits: tl.int64,
    warmup_bits: tl.int64,
    BLOCK: tl.constexpr,
):
    """The only program advances the moving average of each gradient, and writes the limits.

    norms_ptr: float32 or float64 [n_norms]; rows_ptr: int64[n_norms], of their rows, or None for
    all in order; state_ptr, after_ptr: float64[any, 2], average and number of norms, one memory or
    two; limits_ptr: float64[n_norms].
    """
    max_norm = as_float64(max_norm_bits)
    ratio = as_float64(ratio_bits)
    decay = as_float64(decay_bits)
    warmup = as_float64(warmup_bits)
    share = max_norm / combine(norms_ptr, 0, n_norms, 2.0)

    for start in range(0, n_norms, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < n_norms
        if rows_ptr is not None:
            row = tl.load(rows_ptr + offsets, mask=inside, other=0)
        else:
            row = offsets.to(tl.int64)
        norm = tl.load(norms_ptr + offsets, mask=inside, other=0.0).to(tl.float64)
        average = tl.load(state_ptr + 2 * row, mask=inside, other=0.0)
        count = tl.load(state_ptr + 2 * row + 1, mask=inside, other=0.0)

        warm = count >= warmup
        # For a norm of inf, any finite limit gives the coefficient 0.
        by_global_norm = tl.where(norm == INF, max_norm, norm * share)
        limit = tl.where(warm, _least(ratio * average, max_norm), by_global_norm)
        clipped = _least(limit, norm)
        moving = decay * average + (1 - decay) * clipped
        moving = tl.where(warm, moving, _least(average, clipped))
        counts = _counts(norm) & _counts(clipped)

        tl.store(limits_ptr + offsets, limit, mask=inside)
        tl.store(after_ptr + 2 * row, tl.where(counts, moving, average), mask=inside)
        tl.store(after_ptr + 2 * row + 1, tl.where(counts, count + 1, count), mask=inside)

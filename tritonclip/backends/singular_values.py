"""Singular values of matrices, measured and clipped by matrix products.

Matrices of one shape are one stack, [k, small, large], the smaller side first; products are those
of `torch.bmm` in float32, or float64 for float64. Clipping is a function of the Gram matrix
``H = G @ G.T / c ** 2`` times the matrix::

    max(H, I) ** -0.5 @ G
    (I + H) ** -0.5 @ G  # softly

with ``max(H, I) = I + (D + D @ sign(D)) / 2`` of ``D = H - I``. The sign is the
limit of the Newton-Schulz iteration, the inverse root that of its coupled form. Each step is scaled
to the interval that the eigenvalues are known to be in (Chen, Chow, "A stable scaling of
Newton-Schulz for improving the sign function computation of a Hermitian matrix", 2014). On a CPU
the eigenvalue decomposition of H gives the same in a third of the time of these 25 to 50 products.

A Gram matrix squares singular values, so that rounding would drown those near a limit that is far
below the largest. Limits more than `_RANGE` below are therefore reached in stages: to clip at some
larger limit first changes nothing of the result, and of a soft one only the limit that is left.
"""

import math
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tritonclip.backends import choose
from tritonclip.backends.interface import arithmetic_of
from tritonclip.backends.operators import wide_dtype
from tritonclip.modes import is_observed

# Errors against an SVD in float64, over matrices of sizes 2 to 768 whose singular values lie far
# below, at, and up to 1e6 times over the limit, clustered or spread, some of them 0: the largest
# singular value is at most 3e-5 over the limit (float64: 1e-11). A larger range leaves more
# rounding, a smaller one more stages.
_RANGE = 8.0
# How far from the limit, in H, an eigenvalue may be whose sign stays unresolved: the last stage and
# others, which only have to bring singular values over the limit down to anything over it.
_EDGE = {torch.float32: 1e-3, torch.float64: 1e-9}
_LOOSE_EDGE = 0.1
# How far from 1 the last step of an iteration may leave an eigenvalue.
_END = {torch.float32: 1e-5, torch.float64: 1e-12}
# From here on, a step would map the largest eigenvalues to 0.
_LARGEST_SCALE = 1.6977
# Squarings of the Gram matrix by which the largest singular value is bounded: from above within
# m^(1 / 32) for a smaller side of m, and m^(1 / 512) before a stack is clipped in vain.
SQUARINGS = 3
_CAREFUL_SQUARINGS = 7
# Products with a vector, each of 2^SQUARINGS steps of the power iteration: from below within 1%.
_STEPS = 64
# Elements of a stack: more only where one matrix has more.
_STACKED = 2**24
# The largest factor that is applied at once.
_HUGE = 2.0**100
# Singular values of a stack have one scale: beside much larger ones, small matrices would vanish.
_STACKED_BINADES = 60


def is_matrix(tensor: Tensor) -> bool:
    """Whether [out, rest] has at least two rows and two columns; else one norm tells all."""
    return tensor.dim() > 1 and tensor.shape[0] > 1 and tensor.numel() > tensor.shape[0]


def stack_of(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as a stack, in the dtype of products."""
    dtype = arithmetic_of(tensors[0].dtype)
    matrices = [tensor.to(dtype).reshape(len(tensor), -1) for tensor in tensors]
    if matrices[0].shape[0] > matrices[0].shape[1]:
        matrices = [matrix.mT for matrix in matrices]
    return torch.stack(matrices)


def stacks(tensors: Sequence[Tensor], indices: Sequence[int]) -> Iterator[list[int]]:
    """The indices of matrices in as few stacks as their shapes and `_STACKED` allow."""
    alike: dict[object, list[int]] = {}
    for i in indices:
        x = tensors[i]
        alike.setdefault((x.device, x.dtype, x.shape[0], x.numel()), []).append(i)
    for members in alike.values():
        n = max(1, _STACKED // tensors[members[0]].numel())
        for start in range(0, len(members), n):
            yield members[start : start + n]


def extremes(stack: Tensor, squarings: int = SQUARINGS) -> tuple[Tensor, Tensor]:
    """What the largest singular value of each matrix is at least and at most; waits for nothing.

    Args:
        stack: any; NaN and inf give NaN.
        squarings: of the Gram matrix, each for a tighter upper bound.

    Returns:
        The power iteration's value and the Schatten norm of order 2^(squarings + 2), 1-d in the
        wide dtype.
    """
    with torch.autocast(stack.device.type, enabled=False):
        largest = stack.abs().amax((1, 2), keepdim=True)
        unit = stack / torch.where(largest == 0, 1.0, largest)
        power = torch.bmm(unit, unit.mT)
        log = torch.zeros((), dtype=wide_dtype(stack.device), device=stack.device)
        for i in range(squarings + 1):
            power = torch.bmm(power, power) if i else power
            size: Tensor = torch.linalg.matrix_norm(power, keepdim=True)
            power = power / torch.where(size == 0, 1.0, size)
            log = 2 * log + size.to(log.dtype).log()
        # Of quadratic phases: no singular vector that has a structure is orthogonal to it.
        numbers = torch.arange(stack.shape[1], dtype=stack.dtype, device=stack.device)
        vector = torch.cos(numbers.square()).expand(len(stack), 1, -1)
        for i in range(_STEPS):
            # As a row: a column takes ten times as long on a CPU.
            vector = torch.bmm(vector, power)
            if i % 8 == 7:
                # Each step divides it by the root of its size at most.
                size = torch.linalg.matrix_norm(vector, keepdim=True)
                vector = vector / torch.where(size == 0, 1.0, size)
        least = torch.linalg.matrix_norm(torch.bmm(vector, unit), keepdim=True)
        scale = largest.to(log.dtype)
        most = scale * (log / 2 ** (squarings + 1)).exp()
        return (scale * least).flatten(), most.flatten()


def clipped(
    tensors: Sequence[Tensor],
    bounds: Sequence[tuple[float, float]],
    limit: float,
    *,
    soft: bool,
    grad_scale: float = 1.0,
) -> Iterator[tuple[int, Tensor]]:
    """Clips matrices, a stack at a time, out of place; the host reads what it decides by.

    Args:
        tensors: of any shape.
        bounds: of the largest singular value of each: at least, at most; NaN to pass it over.
        limit: positive and finite, of results.
        soft: the smooth form.
        grad_scale: the loss scale that tensors and bounds still carry, and results do not.

    Yields:
        The index of each matrix that changes, and the new one in its dtype and shape.
    """
    floors = [limit * grad_scale] * len(tensors)
    if soft:
        # Every singular value changes, but those below this by less than rounding.
        eps = [torch.finfo(arithmetic_of(x.dtype)).eps for x in tensors]
        floors = [limit * grad_scale * math.sqrt(e) / 2 for e in eps]
    alike: dict[int, list[int]] = {}
    for i, (_, size) in enumerate(bounds):
        if size > floors[i]:
            binades = math.frexp(size)[1] - math.frexp(floors[i])[1]
            alike.setdefault(binades // _STACKED_BINADES, []).append(i)
    for members in (stack for over in alike.values() for stack in stacks(tensors, over)):
        stack, floor = stack_of([tensors[i] for i in members]), floors[members[0]]
        least, most = ([bounds[i][side] for i in members] for side in (0, 1))
        # Of a list that was only measured by 2-norms, nothing is known from below.
        is_known = any(least)
        for squarings in (_CAREFUL_SQUARINGS,) if is_known else (SQUARINGS, _CAREFUL_SQUARINGS):
            if members and min(least) <= floor:
                found = [bound.tolist() for bound in extremes(stack.detach(), squarings)]
                least, most = found[0], list(map(min, most, found[1]))
                chosen = [at for at, bound in enumerate(most) if bound > floor]
                members = [members[at] for at in chosen]
                least, most = ([bound[at] for at in chosen] for bound in (least, most))
                stack = stack if len(chosen) == len(stack) else stack[chosen]
        if not members:
            continue
        made = _clip_stack(stack, limit, max(most), grad_scale, soft=soft)
        for i, matrix in zip(members, made.unbind(), strict=True):
            x = tensors[i]
            is_tall = x.shape[0] > matrix.shape[0]
            yield i, (matrix.mT if is_tall else matrix).reshape(x.shape).to(x.dtype)


def _clip_stack(
    stack: Tensor, limit: float, most: float, grad_scale: float, *, soft: bool
) -> Tensor:
    """The stack without its loss scale, clipped; `most` bounds its singular values from above."""
    ratio = max(limit * grad_scale / most, sys.float_info.min)
    with torch.autocast(stack.device.type, enabled=False):
        # In two factors, neither of which leaves the range of float32.
        largest = float(stack.detach().abs().max())
        x, unit = stack / largest / (most / largest), 1.0
        stages = list(_stages(ratio, soft=soft))
        for number, (bound, span) in enumerate(stages):
            edge = _EDGE[x.dtype] if number == len(stages) - 1 else _LOOSE_EDGE
            x, unit = x * (unit / bound), bound
            x = _coefficient(x, span, edge, soft=soft) @ x
        # A limit may be beyond the range of float32 where no element of the result is.
        size = unit / ratio * limit
        return x * size if size <= _HUGE else x * _HUGE * (size / _HUGE)


def _stages(limit: float, *, soft: bool) -> Iterator[tuple[float, float]]:
    """The limit of each stage, and the ratio of the largest singular value to it.

    In the beginning that is 1. Soft limits add up as ``1 / c ** 2``.
    """
    if not soft:
        n = max(1, math.ceil(-math.log(limit) / math.log(_RANGE)))
        span = max(1.0, limit ** (-1 / n))
        yield from ((span**-i, span) for i in range(1, n + 1))
        return
    largest, left = 1.0, limit
    while largest > _RANGE * left:
        bound = largest / _RANGE
        yield bound, _RANGE
        left = left / math.sqrt(1 - (left / bound) ** 2)
        largest /= math.sqrt(1 + _RANGE**2)
    yield left, largest / left


def _coefficient(x: Tensor, span: float, edge: float, *, soft: bool) -> Tensor:
    """[k, small, small]: what a matrix with singular values up to `span` is multiplied by for 1."""
    end, gram = _END[x.dtype], torch.bmm(x, x.mT)
    if x.requires_grad:
        # The derivative of the last step is the root of what it leaves.
        end = min(end, 1e-8)
    if choose.host_decides(x.device) and not (x.requires_grad or is_observed()):
        # Not where it is differentiated: its derivatives at equal eigenvalues are NaN.
        values, vectors = torch.linalg.eigh(gram)
        least = 0.0 if soft else 1.0
        weights = (values.clamp(min=least) + (1 - least)).rsqrt()
        return torch.bmm(vectors * weights.unsqueeze(1), vectors.mT)
    eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    if soft:
        return _inverse_root(gram + eye, 1 + span**2, end)
    above = gram - eye
    top = max(1.0, span**2 - 1)
    sign = above / top
    for scale in _scales(edge / top, end):
        square = torch.bmm(sign, sign)
        sign = torch.baddbmm(sign, sign, square, beta=1.5 * scale, alpha=-0.5 * scale**3)
    larger = torch.baddbmm(eye + above / 2, above, sign, alpha=0.5)
    return _inverse_root(larger, max(1.0, span**2), end)


def _inverse_root(matrix: Tensor, most: float, end: float) -> Tensor:
    """The inverse square root of symmetric matrices with eigenvalues from 1 to `most`."""
    eye = torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    root, inverse = matrix / most, eye
    for number, scale in enumerate(_scales(most**-0.5, end)):
        product = torch.bmm(inverse, root) if number else root
        step = 1.5 * scale * eye - 0.5 * scale**3 * product
        root = torch.bmm(root, step)
        inverse = torch.bmm(step, inverse) if number else step
    result: Tensor = inverse * most**-0.5
    return result


def _scales(least: float, end: float) -> Iterator[float]:
    """The factor of x in each step x (3 - x^2) / 2, for x from `least` to 1 to come near 1."""
    while 1 - least > end:
        scale = min(math.sqrt(3 / (1 + least + least**2)), _LARGEST_SCALE)
        yield scale
        least = min(scale * x * (3 - (scale * x) ** 2) / 2 for x in (least, 1.0))

"""Clipping the singular values of each matrix."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from tritonclip.backends import singular_values
from tritonclip.backends.operators import wide_dtype
from tritonclip.engine.compiled import break_graph
from tritonclip.functional.by_norm import clip_by_norm
from tritonclip.functional.norms import norms_of_each
from tritonclip.functional.products import scaled
from tritonclip.functional.trees import Tree
from tritonclip.hints import explained
from tritonclip.modes import is_jit_traced, refuse_tracer
from tritonclip.rules.arguments import as_flag, as_limit

T = TypeVar("T")


@explained("clip_by_spectral_norm(x, 1.0)", {"beta": "c"})
def clip_by_spectral_norm(x: T, c: float, soft: bool = False) -> T:
    """Brings the singular values of each matrix that exceed `c` to `c`, in new memory.

    For each singular value s of `x`::

        s = min(s, c)  # soft=False
        s = s / sqrt(1 + (s / c) ** 2)  # soft=True: below c

    Example:
        >>> import torch
        >>> from tritonclip.functional import clip_by_spectral_norm
        >>> weight = torch.tensor([[3.0, 0.0], [0.0, 0.25]])
        >>> for step in range(2):
        ...     gradient = clip_by_spectral_norm(2 * weight, 1.0)
        ...     weight = weight - 0.1 * gradient
        >>> gradient
        tensor([[1.0000, 0.0000],
                [0.0000, 0.4000]])
        >>> clip_by_spectral_norm(2 * weight, 1.0, soft=True)
        tensor([[0.9844, 0.0000],
                [0.0000, 0.3048]])

    Args:
        x: a tensor, or a nested structure of tensors and None, as for :func:`clip_by_norm`. Real
            and strided, of any floating-point dtypes and devices. One of more than two dimensions
            is the matrix [out, rest], as the weight of a convolution is. One of fewer, or of one
            row or column, has one singular value, its 2-norm.
        c: the largest singular value, 0 or more; inf changes nothing.
        soft: the second formula, which changes every singular value a little.

    Returns:
        The same structure with new tensors, which share no memory with `x`, in its dtypes.

    Raises:
        TypeError: a leaf that is no plain floating-point tensor, or is complex or sparse; `c` that
            is no number, `soft` that is no bool.
        ValueError: a limit that is negative or NaN.
        RuntimeError: inside of make_fx, torch.jit.trace, FakeTensorMode and torch.func.vmap, where
            no value can be read.

    Notes:
        There is no decomposition on a GPU, only products of float32 matrices (float64 for float64),
        like shapes in one batch. docs/spectral.md has the bounds of their errors, and says which
        matrices keep all bits. The host waits for the device, as often as shapes differ.

        A matrix with a NaN becomes NaN; an inf makes its finite elements 0. First derivatives are
        those of the products, which keep about 40 matrices of the smaller side; at the limit, where
        that of the hard form jumps, it is smooth within 1e-3 of `c`. torch.compile breaks the
        graph.

    References:
        `Gradient clipping beyond vector norms <https://arxiv.org/abs/2605.11838>`_, 2026; Jiang,
        Semenov, Stich, `Enhancing LLM training via spectral clipping
        <https://arxiv.org/abs/2603.14315>`_, 2026; NVIDIA, Emerging-Optimizers,
        `spectral_hardcap`.
    """
    if torch.compiler.is_compiling():
        return break_graph(clip_by_spectral_norm, x, c, soft)  # type: ignore[no-any-return]
    tree = Tree(x, "x")
    values = tree.check()
    for tensor in tree.tensors:
        if tensor.is_complex() or tensor.layout != torch.strided:
            got = f"dtype {tensor.dtype}" if tensor.is_complex() else f"layout {tensor.layout}"
            raise TypeError(
                f"clip_by_spectral_norm takes real and dense matrices, got one of {got}; convert "
                "it with to_dense(), or clip by norm"
            )
    limit, soft = as_limit("c", c), as_flag("soft", soft)
    refuse_tracer()
    if is_jit_traced():
        raise RuntimeError(
            "clip_by_spectral_norm reads values that torch.jit.trace would make constants; "
            "expected a call outside of it"
        )
    result: T = tree.rebuild(_clip_each(values, limit, soft=soft) if values else [])
    return result


def _clip_each(values: list[Tensor], limit: float, *, soft: bool) -> list[Tensor]:
    """Each tensor by its singular values, or by its norm where it has one of them."""
    norms, is_limit = norms_of_each(values, 2.0), 0 < limit < math.inf
    try:
        numbers = norms.tolist()
    except RuntimeError as error:
        raise RuntimeError(
            "clip_by_spectral_norm reads the norms of matrices, and torch.func.vmap has no numbers "
            "for them; expected a call outside: clip_by_spectral_norm(list(batch), c)"
        ) from error
    for i, x in enumerate(values):
        if numbers[i] == math.inf and singular_values.is_matrix(x):
            # That of a finite matrix may be beyond the range of its dtype.
            norm = torch.linalg.vector_norm(x.detach(), dtype=wide_dtype(x.device))
            numbers[i] = float(norm)
    # One norm tells all of a vector, of what is not finite, and of what any limit leaves or zeroes.
    bounds = [
        (0.0, n if is_limit and math.isfinite(n) and singular_values.is_matrix(x) else math.nan)
        for x, n in zip(values, numbers, strict=True)
    ]
    by_norm = [i for i, (_, most) in enumerate(bounds) if math.isnan(most)]
    vectors = [values[i] for i in by_norm]
    if soft and is_limit and vectors:
        coefficients = (1 / torch.hypot(torch.ones_like(norms), norms / limit)).unbind()
        vectors = scaled(vectors, [coefficients[i] for i in by_norm])
    else:
        vectors = clip_by_norm(vectors, limit)
    made = dict(zip(by_norm, vectors, strict=True))
    made.update(singular_values.clipped(values, bounds, limit, soft=soft))
    return [made[i] if i in made else x.clone() for i, x in enumerate(values)]

"""Covering arrays: of a full product of parameters, the few cases that hold every combination.

Most faults show in one value, or in two that meet. `make test` runs the cases that a test's marker
`covering(strength)` chooses, and `nox -s exhaustive` the rest of the product.
"""

from collections.abc import Hashable, Sequence
from itertools import combinations


def covering(cases: Sequence[Sequence[Hashable]], strength: int) -> list[int]:
    """The indices of cases that hold every combination of `strength` values of different axes."""
    axes = [list(enumerate(case)) for case in cases]
    held = [set(combinations(case, min(strength, len(case)))) for case in axes]
    left = set().union(*held)
    chosen = []
    while left:
        # Of equals the first: every worker chooses the same.
        best = max(range(len(cases)), key=lambda i: len(held[i] & left))
        chosen.append(best)
        left -= held[best]
    return sorted(chosen)

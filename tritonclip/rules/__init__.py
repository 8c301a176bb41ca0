"""Rules: the limits of gradients."""

from torch.serialization import add_safe_globals

from tritonclip.rules.exclusion import Excluded
from tritonclip.rules.fixed import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByRMS,
    ClipByValue,
    as_rule,
    by_number,
)
from tritonclip.rules.own_history import ClipByOwnHistory, ClipByOwnQuantile
from tritonclip.rules.rule import AdaptiveRule, Measured, Norm, Rule
from tritonclip.rules.spectral import ClipBySpectralNorm
from tritonclip.rules.state import BoundRule, ClipState, Numbering, follow
from tritonclip.rules.unitwise import ClipByUnitNorm
from tritonclip.rules.window import ClipByQuantile, LossOutlier, Outlier
from tritonclip.rules.zscore import ClipByZScore

__all__ = [
    "AdaptiveRule",
    "BoundRule",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByOwnHistory",
    "ClipByOwnQuantile",
    "ClipByQuantile",
    "ClipByRMS",
    "ClipBySpectralNorm",
    "ClipByUnitNorm",
    "ClipByValue",
    "ClipByZScore",
    "ClipState",
    "LossOutlier",
    "Measured",
    "Norm",
    "Numbering",
    "Outlier",
    "Rule",
    "as_rule",
    "by_number",
    "follow",
]

# Trainers save param groups, with rules among their keys, and load them with `weights_only=True`.
add_safe_globals(
    [
        ClipByGlobalNorm,
        ClipByNorm,
        ClipByOwnHistory,
        ClipByOwnQuantile,
        ClipByQuantile,
        ClipByRMS,
        ClipBySpectralNorm,
        ClipByUnitNorm,
        ClipByValue,
        ClipByZScore,
        Excluded,
        Outlier,
    ]
)

"""Rules: limits for gradients."""

from torch.serialization import add_safe_globals

from tritonclip.rules.each import ClipByOwnHistory, ClipByRMS
from tritonclip.rules.fixed import ClipByGlobalNorm, ClipByNorm, ClipByValue, as_rule, by_number
from tritonclip.rules.following import Following, Numbering
from tritonclip.rules.rule import Measured, Rule
from tritonclip.rules.state import ClipState, follow
from tritonclip.rules.unitwise import ClipByUnitNorm, Excluded
from tritonclip.rules.window import ClipByQuantile, Outlier
from tritonclip.rules.zscore import ClipByZScore

__all__ = [
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByOwnHistory",
    "ClipByQuantile",
    "ClipByRMS",
    "ClipByUnitNorm",
    "ClipByValue",
    "ClipByZScore",
    "ClipState",
    "Following",
    "Measured",
    "Numbering",
    "Outlier",
    "Rule",
    "as_rule",
    "by_number",
    "follow",
]

# Trainers save the keys of parameter groups, rules among them, and load with `weights_only=True`.
add_safe_globals(
    [
        ClipByGlobalNorm,
        ClipByNorm,
        ClipByOwnHistory,
        ClipByQuantile,
        ClipByRMS,
        ClipByUnitNorm,
        ClipByValue,
        ClipByZScore,
        Excluded,
        Outlier,
    ]
)

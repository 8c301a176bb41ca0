"""Rules set the limits of gradients. `__all__` lists the public names, which tritonclip has too."""

from tritonclip.rules.fixed import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByRMS,
    ClipByUnitNorm,
    ClipByValue,
)
from tritonclip.rules.fixed import as_rule as as_rule
from tritonclip.rules.fixed import known_rule as known_rule
from tritonclip.rules.fixed import rule_for_one as rule_for_one
from tritonclip.rules.fixed import rule_of as rule_of
from tritonclip.rules.moving_average import ClipByOwnHistory, ClipByZScore
from tritonclip.rules.rule import AdaptiveRule, Rule
from tritonclip.rules.rule import Measured as Measured
from tritonclip.rules.rule import Norm as Norm
from tritonclip.rules.rule import has_user_limit as has_user_limit
from tritonclip.rules.state import BoundRule as BoundRule
from tritonclip.rules.state import ClipState
from tritonclip.rules.state import Numbering as Numbering
from tritonclip.rules.state import follow as follow
from tritonclip.rules.window import ClipByOwnQuantile, ClipByQuantile, Outlier
from tritonclip.rules.window import LossOutlier as LossOutlier

__all__ = [
    "AdaptiveRule",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByOwnHistory",
    "ClipByOwnQuantile",
    "ClipByQuantile",
    "ClipByRMS",
    "ClipByUnitNorm",
    "ClipByValue",
    "ClipByZScore",
    "ClipState",
    "Outlier",
    "Rule",
]

"""Rules: the limits of gradients. `__all__` has the public names, which are tritonclip's too."""

from tritonclip.rules.fixed import ClipByGlobalNorm, ClipByNorm, ClipByRMS, ClipByValue
from tritonclip.rules.fixed import as_rule as as_rule
from tritonclip.rules.fixed import known_rule as known_rule
from tritonclip.rules.fixed import rule_for_one as rule_for_one
from tritonclip.rules.fixed import rule_of as rule_of
from tritonclip.rules.history import ClipByOwnHistory
from tritonclip.rules.outlier import LossOutlier as LossOutlier
from tritonclip.rules.outlier import Outlier
from tritonclip.rules.quantile import ClipByOwnQuantile, ClipByQuantile
from tritonclip.rules.rule import AdaptiveRule, Rule
from tritonclip.rules.rule import Measured as Measured
from tritonclip.rules.rule import Norm as Norm
from tritonclip.rules.rule import has_user_limit as has_user_limit
from tritonclip.rules.state import BoundRule as BoundRule
from tritonclip.rules.state import ClipState
from tritonclip.rules.state import Numbering as Numbering
from tritonclip.rules.state import follow as follow
from tritonclip.rules.unitwise import ClipByUnitNorm
from tritonclip.rules.zscore import ClipByZScore

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

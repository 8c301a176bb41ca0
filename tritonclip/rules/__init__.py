"""Rules: the limits of gradients."""

from tritonclip.rules.fixed import ClipByGlobalNorm as ClipByGlobalNorm
from tritonclip.rules.fixed import ClipByNorm as ClipByNorm
from tritonclip.rules.fixed import ClipByRMS as ClipByRMS
from tritonclip.rules.fixed import ClipByValue as ClipByValue
from tritonclip.rules.fixed import as_rule as as_rule
from tritonclip.rules.fixed import known_rule as known_rule
from tritonclip.rules.fixed import rule_for_one as rule_for_one
from tritonclip.rules.fixed import rule_of as rule_of
from tritonclip.rules.history import ClipByOwnHistory as ClipByOwnHistory
from tritonclip.rules.outlier import LossOutlier as LossOutlier
from tritonclip.rules.outlier import Outlier as Outlier
from tritonclip.rules.quantile import ClipByOwnQuantile as ClipByOwnQuantile
from tritonclip.rules.quantile import ClipByQuantile as ClipByQuantile
from tritonclip.rules.rule import AdaptiveRule as AdaptiveRule
from tritonclip.rules.rule import Measured as Measured
from tritonclip.rules.rule import Norm as Norm
from tritonclip.rules.rule import Rule as Rule
from tritonclip.rules.rule import has_user_limit as has_user_limit
from tritonclip.rules.state import BoundRule as BoundRule
from tritonclip.rules.state import ClipState as ClipState
from tritonclip.rules.state import Numbering as Numbering
from tritonclip.rules.state import follow as follow
from tritonclip.rules.unitwise import ClipByUnitNorm as ClipByUnitNorm
from tritonclip.rules.zscore import ClipByZScore as ClipByZScore

"""Rules: limits for gradients."""

from tritonclip.rules.fixed import ClipByGlobalNorm, ClipByNorm, ClipByValue, as_rule
from tritonclip.rules.rule import Rule

__all__ = ["ClipByGlobalNorm", "ClipByNorm", "ClipByValue", "Rule", "as_rule"]

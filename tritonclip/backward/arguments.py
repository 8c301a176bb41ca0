"""Checks of arguments: rules that can be kept where one gradient is seen at a time."""

from tritonclip.engine.checks import POLICIES, unknown_policy
from tritonclip.rules import ClipByGlobalNorm, ClipByNorm, ClipByValue


def rule_for_one(rule: object, name: str) -> ClipByNorm | ClipByValue:
    """The rule itself.

    Args:
        rule: of the user.
        name: of the function that it was handed to.

    Raises:
        TypeError: anything that is no rule for a single gradient.
        ValueError: a limit that is a function of the step.
    """
    if isinstance(rule, ClipByNorm | ClipByValue):
        if not rule.fixed:
            raise ValueError(
                f"{name} sees no steps, but the limit of {rule} is a function of the step; "
                "expected a number"
            )
        return rule
    expected = f"{name} expects ClipByNorm(...) or ClipByValue(...)"
    if isinstance(rule, ClipByGlobalNorm) or (
        isinstance(rule, int | float) and not isinstance(rule, bool)
    ):
        raise TypeError(
            f"{expected}, got {rule!r}, a norm of all gradients. Backward hands over one gradient "
            "at a time, and passes it on before the next one is known; clip by one norm after "
            "backward, with clip_ or a ClippedOptimizer"
        )
    if isinstance(rule, type):
        raise TypeError(f"{expected}, got the class {rule.__name__}; write {rule.__name__}(...)")
    raise TypeError(f"{expected}, got {rule!r:.80} of type {type(rule).__name__}")


def check_policy(nonfinite: object) -> None:
    """Refuses an unknown policy for NaN and inf."""
    if nonfinite not in POLICIES:
        raise unknown_policy(nonfinite)

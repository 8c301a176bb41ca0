"""Raises the error of one process on all that share its norm, and checks that they agree.

Under `verify()` they have to be about to do the same with the same parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import Any
from zlib import crc32

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tritonclip import settings
from tritonclip.distributed.domain import ERRORS, Domain, domain_of, gather_objects
from tritonclip.rules import ClipState, Norm, Rule


def agree(described: Mapping[str, str], error: Exception | None, domain: Domain) -> None:
    """Raises on every process of a domain if one has an error, or if what they describe differs."""
    message = None
    if error is not None:
        index = next((i for i, cls in enumerate(ERRORS) if isinstance(error, cls)), None)
        message = index, str(error) if index is not None else f"{type(error).__name__}: {error}"
    everyone = gather_objects((message, dict(described)), domain)
    if error is not None:
        raise error
    for rank, (found, _) in everyone.items():
        if found is not None:
            index, text = found
            raise (RuntimeError if index is None else ERRORS[index])(
                f"rank {rank} raised, so no gradient was clipped on any rank: {text}"
            )
    for name in dict.fromkeys(name for _, texts in everyone.values() for name in texts):
        holders: dict[str, list[str]] = {}
        for rank, (_, texts) in everyone.items():
            holders.setdefault(texts.get(name, "nothing"), []).append(f"rank {rank}")
        if len(holders) > 1:
            shown = " and ".join(f"{', '.join(at)} has {text}" for text, at in holders.items())
            raise ValueError(
                f"processes that share a norm differ in {name}: {shown}; expected the same rules, "
                "policies, states and parameters in the same order on all of them. For processes "
                "with other parameters, pass process_group="
            )


def verify_replicas(
    model: DistributedDataParallel,
    rule: Rule,
    grad_scale: object,
    nonfinite: str,
    state: ClipState | None,
) -> None:
    """Under `verify()`, raises on every process where replicas would be clipped differently."""
    if not settings.current().verifying:
        return
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    described = describe_call(rule, grad_scale, nonfinite, state)
    described |= describe_parameters([p for _, p in named], lambda at: named[at][0])
    agree(described, None, domain_of([], model.process_group))


def describe_call(
    rule: Rule | Norm, grad_scale: object, nonfinite: str, state: ClipState | None
) -> dict[str, str]:
    """Describes, by name, everything that processes which share a norm have to agree on."""
    # A tensor's text has its device, which differs.
    scale = grad_scale.tolist() if isinstance(grad_scale, Tensor) else grad_scale
    return {
        "the rule": str(rule) if isinstance(rule, Norm) else describe_rule(rule),
        "the policy for NaN and inf": nonfinite,
        "the loss scale": f"{scale!r:.80}",
        "the state": "none" if state is None else describe_state(state.state_dict()),
    }


def describe_rule(rule: Any) -> str:
    """The name of a rule and its numbers; those of the call, if it is bound to its state."""
    rule = getattr(rule, "rule", rule)
    cls = type(rule)
    # For a class that is no dataclass, attributes take the place of arguments. A cached property
    # is none: it is there only after a call that needed it.
    public = [
        name
        for name in getattr(rule, "__dict__", ())
        if not (name.startswith("_") or isinstance(getattr(cls, name, None), cached_property))
    ]
    names = dict.fromkeys((*rule.__match_args__, "norm_type", "eps", *public))
    values = {name: getattr(rule, name, None) for name in names}
    shown = (
        f"{name}={value!r}" if isinstance(value, Real | str) else f"{name}: {type(value).__name__}"
        for name, value in values.items()
    )
    return f"{cls.__name__}({', '.join(shown)})"


def describe_state(state: Mapping[str, Any]) -> str:
    """The result of `ClipState.state_dict`, with a checksum of the digits of its values."""
    digits = repr(state["values"]).encode()
    return f"{state['kind'] or 'no norms'} after {state['steps']} calls, {crc32(digits):x}"


def describe_parameters(
    parameters: Sequence[Tensor], label_of: Callable[[int], str]
) -> dict[str, str]:
    """Name, shape, dtype and placements of each parameter, by its position."""
    return {
        f"the parameter at position {at}": f"{label_of(at)} of shape {tuple(parameter.shape)}, "
        f"{parameter.dtype} and placements {getattr(parameter, 'placements', 'of a plain tensor')}"
        for at, parameter in enumerate(parameters)
    }

"""Runs of a wrapper, against a model in plain Python: every number after every step.

The model knows groups and their rules, policies, bounds and outliers, loss scales, closures,
recorders, checkpoints and copies. What the wrapped optimizer makes of gradients is what a bare twin
makes of the same ones.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import tritonclip
from helpers import reference
from helpers.cases import assert_bits, bounds_of, copies, grad_of, normal
from helpers.memories import ADAPTIVE, coefficient
from helpers.optimizers import torch_saved
from helpers.training import state_of
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer, Outlier
from tritonclip.monitor.history import read
from tritonclip.optim.wrapping import takes_found_inf

COUNTS = ("steps", "clipped_steps", "skipped_steps", "overflowed_steps", "consecutive_skips")
LAST = ("norm", "coefficient", "limit")
NAN = math.nan
SCALERS = {"torch": torch.amp.GradScaler, "tritonclip": tritonclip.GradScaler}
INNERS: dict[str, Any] = {
    "momentum": lambda groups: SGD(groups, lr=1.0, momentum=0.9, foreach=False),
    "foreach": lambda groups: AdamW(groups, lr=0.1, foreach=True),
    "fused": lambda groups: AdamW(groups, lr=0.1, fused=True),
    "fused-sgd": lambda groups: SGD(groups, lr=1.0, fused=True),
}

LIMITS = st.floats(1e-2, 1e2)
ORDERS = st.sampled_from([1.0, 2.0, 2.0, 3.0, torch.inf])
EPS = st.sampled_from([0.0, 1e-6])
FIXED = st.one_of(
    st.builds(ClipByGlobalNorm, LIMITS, ORDERS, eps=EPS),
    st.builds(ClipByNorm, LIMITS, ORDERS, eps=EPS),
    st.builds(lambda low, high: ClipByValue(-low, high), LIMITS, LIMITS),
)
RULES = FIXED | st.sampled_from([kind(*numbers) for kind, _, numbers in ADAPTIVE])
# Of a group: a rule of its own, None for no clipping, or none of its own.
ABSENT = "absent"


@dataclass(frozen=True)
class Member:
    """A parameter: its size, its group, and whether it is clipped."""

    size: int
    group: int
    need_clip: bool


@dataclass(frozen=True)
class Setting:
    """How a run is set up."""

    members: list[Member]
    rule: Any
    own: list[Any]
    policy: str
    skip_above: Any
    most: int | None
    scale: Any
    inner: str
    dtype: torch.dtype
    unscales: bool
    records: bool

    @property
    def scaler(self) -> str | None:
        return self.scale if isinstance(self.scale, str) else None


@dataclass(frozen=True)
class Event:
    """A step, or what comes between steps: a checkpoint, a copy, another rule, one rule less."""

    kind: str
    # The magnitude of each gradient, None for no gradient; one bad element in the first of them.
    sizes: list[float | None]
    bad: float | None
    loss: float | None
    # The factor of the learning rate. At 0 a step counts, though torch makes state by such steps.
    rate: float
    rule: Any


MEMBERS = st.builds(
    Member, st.sampled_from([7, 0, 1, 33, 700]), st.integers(0, 2), st.sampled_from([1, 1, 1, 0])
)
EVENTS = st.builds(
    Event,
    st.sampled_from(["step"] * 7 + ["closure", "save", "copy", "rule", "rule", "own"]),
    st.lists(st.sampled_from([1.0, 1.0, 1e-3, 1e3, 0.0, None]), min_size=5, max_size=5),
    st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
    st.sampled_from([None, 1.0, 1.5, -2.0, 50.0, math.nan, math.inf]),
    st.sampled_from([1.0, 1.0, 0.0]),
    FIXED,
)
SETTINGS = st.builds(
    Setting,
    st.lists(MEMBERS, min_size=1, max_size=5),
    RULES,
    st.just([ABSENT] * 3)
    | st.lists(st.sampled_from([ABSENT, None]) | RULES, min_size=3, max_size=3),
    st.sampled_from(["propagate", "error", "zero", "skip", "skip"]),
    st.sampled_from([None, None, 20.0, Outlier(2.0, 4)]),
    st.sampled_from([None, 2]),
    st.sampled_from([None, None, 8.0, torch.tensor(3.0), *SCALERS]),
    st.sampled_from([*INNERS]),
    st.sampled_from([torch.float32, torch.float32, torch.float64]),
    st.booleans(),
    st.booleans(),
)


class Test:
    """Whether a number is an outlier among the last ones."""

    __test__ = False

    def __init__(self, above: Outlier, enters: Any) -> None:
        self.above, self.enters, self.last = above, enters, list[float]()

    def is_above(self, number: float) -> bool:
        last = self.last[-self.above.window :]
        if len(last) < self.above.window // 2:
            return False
        return number > float(np.mean(last) + self.above.sigmas * np.std(last, ddof=1))

    def remember(self, number: float) -> None:
        if self.enters(number):
            self.last.append(number)


def limits_of(rule: Any) -> Any:
    """The limits of a rule, from the norms of a step and the places of their gradients."""
    for kind, limits, numbers in ADAPTIVE:
        if rule == kind(*numbers):
            made = limits(*numbers)
            return made if rule.per_gradient else partial(_of_all, made)
    return lambda norms, _: [rule.max_norm] * len(norms)


def _of_all(limit: Any, norms: list[float], _: Any) -> list[float]:
    return [limit(norms[0])]


@dataclass
class Model:
    """What a run has done, and what it shows."""

    setting: Setting
    # Whether the wrapped optimizer takes `found_inf`; torch's copies of a fused one do not.
    is_told: bool = False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    n_measured: int = 0
    last: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LAST, NAN))
    rows: list[dict[str, float]] = field(default_factory=list)
    scale: float = 1024.0
    n_finite: int = 0

    def __post_init__(self) -> None:
        self.rule, self.own = self.setting.rule, [*self.setting.own]
        self.limits: dict[Any, Any] = {}
        above = self.setting.skip_above
        if isinstance(above, Outlier):
            self.norm_test = Test(above, lambda norm: math.isfinite(norm) and norm > 0)
            self.loss_test = Test(above, math.isfinite)

    def shares(self) -> dict[int | None, list[int]]:
        """The members that share a rule, by group; None of the wrapper's."""
        found: dict[int | None, list[int]] = {None: []} if ABSENT in self.own else {}
        found |= {i: [] for i, own in enumerate(self.own) if own not in (ABSENT, None)}
        for at, member in enumerate(self.setting.members):
            own = self.own[member.group]
            if member.need_clip and own is not None:
                found[None if own is ABSENT else member.group].append(at)
        return found

    def step(self, grads: Sequence[Tensor | None], loss: float | None) -> str:
        """What becomes of a step; `grads` become those that it applies, where it is taken."""
        setting = self.setting
        self.grads = [None if grad is None else grad.double() for grad in grads]
        finite = all(bool(grad.isfinite().all()) for grad in grads if grad is not None)
        fate = self._fate(finite, loss)
        if setting.scaler is not None:
            self.n_finite = self.n_finite + 1 if finite else 0
            if not finite or self.n_finite == 2:
                self.scale, self.n_finite = self.scale * (2.0 if finite else 0.5), 0
        if fate in ("error", "unseen"):
            return fate
        row = {"skipped": float(fate != "taken"), "loss": NAN if loss is None else loss}
        norms = {key: self._norms(key) for key in self.shares()}
        row["norm"] = self._row_norm(norms.get(None))
        row |= {
            f"group{key}": two(of)
            for key, of in norms.items()
            if key is not None and of is not None
        }
        if fate == "overflow":
            self.counts["overflowed_steps"] += 1
        elif fate == "skip":
            self.counts["skipped_steps"] += 1
            self.counts["consecutive_skips"] += 1
        if fate == "taken":
            self._take(norms)
            row |= {name: self.last[name] for name in ("coefficient", "limit")}
        self.rows.append(row)
        return fate

    def _fate(self, finite: bool, loss: float | None) -> str:
        setting, above = self.setting, False
        if not finite and setting.scaler is not None:
            # torch's scaler does not call a step that it leaves out, but for optimizers that look.
            return "overflow" if setting.scaler == "tritonclip" or self.is_told else "unseen"
        if setting.skip_above is not None:
            clipped = [self.grads[i] for share in self.shares().values() for i in share]
            norm = reference.total_norm([grad for grad in clipped if grad is not None])
            if isinstance(setting.skip_above, Outlier):
                above = self.norm_test.is_above(norm)
                above = above or (loss is not None and self.loss_test.is_above(loss))
            else:
                above = norm > setting.skip_above
        fate = "skip" if above or (setting.policy == "skip" and not finite) else "taken"
        if fate == "taken" and setting.policy == "error" and not finite:
            return "error"
        if isinstance(setting.skip_above, Outlier):
            self.norm_test.remember(norm)
            if loss is not None:
                self.loss_test.remember(loss)
        return fate

    def rule_of(self, key: int | None) -> Any:
        return self.rule if key is None else self.own[key]

    def _norms(self, key: int | None) -> list[float] | None:
        """The norms that a rule measures, one for a global norm; None of a rule by value."""
        rule, share = self.rule_of(key), self.shares()[key]
        given = [grad for i in share if (grad := self.grads[i]) is not None]
        if isinstance(rule, ClipByValue):
            return None
        if rule.per_gradient:
            return reference.norms(given, rule.norm_type)
        return [reference.total_norm(given, rule.norm_type)]

    def _row_norm(self, shared: list[float] | None) -> float:
        """That of the wrapper's rule, else the 2-norm of all that is clipped."""
        if shared is not None:
            return two(shared)
        members = [i for share in self.shares().values() for i in share]
        return reference.total_norm([g for i in members if (g := self.grads[i]) is not None])

    def _take(self, norms: dict[int | None, list[float] | None]) -> None:
        """Clips, and keeps what a summary shows."""
        self.last, least = dict.fromkeys(LAST, NAN), list[float]()
        for key, found in norms.items():
            rule, share = self.rule_of(key), self.shares()[key]
            at = [i for i in share if self.grads[i] is not None]
            given = [grad for i in at if (grad := self.grads[i]) is not None]
            zeroes = self.setting.policy == "zero" and not all(
                bool(grad.isfinite().all()) for grad in given
            )
            if found is None:
                by = [0.0 if zeroes else 1.0] * len(given)
                given = [grad.clamp(*bounds_of(rule)) for grad in given]
            else:
                if key not in self.limits:
                    self.limits[key] = limits_of(rule)
                limit = self.limits[key](found, at) if given else [NAN]
                by = [coefficient(n, m, rule.eps) for n, m in zip(found, limit, strict=False)]
                by = [0.0] * len(by) if zeroes else by
                prefix = "" if key is None else f"group{key}_"
                least.append(float(np.min(by or [1.0])) if given else 1.0)
                self.last[prefix + "norm"] = float(np.max(found or [0.0]))
                self.last[prefix + "coefficient"] = least[-1]
                if key is None:
                    # Of several limits there is no single one, nor where no gradient has elements.
                    is_one = len(limit) == 1 and any(grad.numel() for grad in given)
                    is_known = not rule.per_gradient or rule.fixed or is_one
                    self.last["limit"] = limit[0] if is_known else NAN
                by = by if rule.per_gradient else by * len(given)
            for i, grad, factor in zip(at, given, by, strict=True):
                self.grads[i] = torch.zeros_like(grad) if zeroes else grad * factor
        self.counts["steps"] += 1
        self.counts["consecutive_skips"] = 0
        self.n_measured += bool(least)
        self.counts["clipped_steps"] += any(one < 1 for one in least)

    @property
    def summary(self) -> dict[str, float]:
        share = self.counts["clipped_steps"] / self.n_measured if self.n_measured else NAN
        return {**self.last, **self.counts, "clipped_share": share}


def two(norms: Sequence[float]) -> float:
    """The 2-norm of norms."""
    return float(np.linalg.norm(norms)) if norms else 0.0


class Run:
    """The optimizer of a setting, its bare twin, its scaler and its recorder."""

    def __init__(self, setting: Setting, device: torch.device, path: Path) -> None:
        self.setting, self.path = setting, path
        self.recorder: Any = None
        self.rule, self.own = setting.rule, [*setting.own]
        params: list[Tensor] = [
            torch.nn.Parameter(normal(member.size, setting.dtype, device, seed=at))
            for at, member in enumerate(setting.members)
        ]
        self.twins = deepcopy(params)
        self.bare: Optimizer = INNERS[setting.inner](self._groups(self.twins))
        self._make(params)
        self.scaler = None if setting.scaler is None else self._scaler(setting.scaler)

    def _groups(self, params: list[Tensor]) -> list[dict[str, Any]]:
        members = [*zip(params, self.setting.members, strict=True)]
        return [{"params": [p for p, m in members if m.group == i]} for i in range(3)]

    def _scaler(self, name: str) -> Any:
        device = self.params[0].device.type
        return SCALERS[name](device, init_scale=1024.0, growth_interval=2)

    def _make(self, params: list[Tensor]) -> None:
        self.params = params
        for param, member in zip(params, self.setting.members, strict=True):
            param.need_clip = bool(member.need_clip)  # type: ignore[attr-defined]
        groups = self._groups(params)
        for group, rule in zip(groups, self.own, strict=True):
            if rule is not ABSENT:
                group["clip"] = rule
        self.optimizer = ClippedOptimizer(
            INNERS[self.setting.inner](groups),
            self.rule,
            nonfinite=self.setting.policy,  # type: ignore[arg-type]
            skip_above=self.setting.skip_above,
            max_consecutive_skips=self.setting.most,
        )
        if self.setting.records:
            self.recorder = self.optimizer.recorder = tritonclip.record(self.path)

    def save(self) -> None:
        """A new program goes on from the files of this one, under the other scaler."""
        saved = torch_saved(self.optimizer.state_dict(), weights_only=True)
        if self.recorder is not None:
            self.recorder.close()
        self._make([torch.nn.Parameter(param.detach().clone()) for param in self.params])
        self.optimizer.load_state_dict(saved)
        if self.scaler is not None:
            state = self.scaler.state_dict()
            other = "torch" if self.setting.scale == "tritonclip" else "tritonclip"
            self.setting = replace(self.setting, scale=other)
            self.scaler = self._scaler(other)
            self.scaler.load_state_dict(state)

    def copy(self) -> None:
        """A copy goes on with the recorder, and the original is left alone."""
        self.params, self.optimizer = deepcopy((self.params, self.optimizer))
        assert self.optimizer.recorder is None
        self.optimizer.recorder = self.recorder

    def loss_of(self, event: Event) -> float | None:
        """The loss of a step, where anything takes it."""
        is_taken = self.recorder is not None or isinstance(self.setting.skip_above, Outlier)
        return event.loss if is_taken else None

    def step(self, grads: Sequence[Tensor | None], event: Event) -> None:
        """Takes a step on gradients, under a loss scale."""
        setting, scale, calls = self.setting, self.setting.scale, list[int]()
        if self.scaler is not None:
            self.scaler.scale(torch.zeros(1, device=self.params[0].device))
            scale = self.scaler.get_scale()
        loss = self.loss_of(event)
        self.optimizer.loss = None

        def closure() -> float:
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = None
                if grad is not None:
                    param.grad = (grad if scale is None else grad * scale).to(param.device)
            self.optimizer.loss = loss
            calls.append(1)
            return 7.0

        if self.scaler is None:
            options = {} if scale is None else {"grad_scale": scale}
            if event.kind == "closure":
                result = self.optimizer.step(closure, **options)
                assert (result, len(calls)) == (7.0, 1)
                return
            closure()
            assert self.optimizer.step(**options) is None
            return
        closure()
        if setting.unscales:
            self.scaler.unscale_(self.optimizer)
        try:
            self.scaler.step(self.optimizer)
        finally:
            self.scaler.update()

    def assert_takes(
        self, expected: Sequence[Tensor | None], given: Sequence[Tensor | None]
    ) -> None:
        """The gradients are those of the model, and the parameters those of the bare optimizer."""
        adaptive = any(not getattr(r, "fixed", True) for r in (self.rule, *self.own))
        for param, twin, truth, grad in zip(self.params, self.twins, expected, given, strict=True):
            twin.grad = None
            if truth is None or grad is None:
                continue
            # A norm is right to 1e-6; its rounding, the coefficient's, each element's are 2**-24.
            # What no rule changes keeps its bits, where the loss scale is a power of two.
            is_same = torch.equal(truth, grad.double()) and self.setting.scale != 3.0
            rtol = 0.0 if is_same else 1e-5 if adaptive else 1.4e-6
            found = grad_of(param).cpu().double()
            torch.testing.assert_close(found, truth, rtol=rtol, atol=2.0**-149, equal_nan=True)
            twin.grad = grad_of(param).clone()
        self.bare.step()

    def assert_is(self, model: Model) -> None:
        """Parameters, state, scale and statistics."""
        assert_bits(self.params, copies(self.twins))
        for param, twin in zip(self.params, self.twins, strict=True):
            if twin in self.bare.state:
                assert_bits(state_of(self.optimizer, [param]), state_of(self.bare, [twin]))
        if self.scaler is not None:
            assert self.scaler.get_scale() == model.scale
        # On a device, groups have entries before their first step is taken.
        shown, expected = (
            {k: v for k, v in summary.items() if v == v or k[:5] != "group"}
            for summary in (self.optimizer.stats.summary(), model.summary)
        )
        assert shown == pytest.approx(expected, rel=1e-5, nan_ok=True)
        assert {k for k, v in shown.items() if type(v) is int} == set(COUNTS)


def gradients(members: Sequence[Member], event: Event, seed: int, dtype: Any) -> list[Any]:
    """The gradients of a step; the first that has elements takes the bad one."""
    grads: list[Tensor | None] = []
    bad = event.bad
    for at, (member, size) in enumerate(zip(members, event.sizes, strict=False)):
        grad = None
        if size is not None:
            grad = size * normal(member.size, dtype, seed=100 * seed + at)
            if bad is not None and member.size:
                grad[-1], bad = bad, None
        grads.append(grad)
    return grads


def possible(setting: Setting) -> Setting:
    """The setting that the wrapper takes: skips to count, and gradients for a scaler to look at."""
    most = setting.most if setting.policy == "skip" or setting.skip_above is not None else None
    members = [replace(setting.members[0], size=7), *setting.members[1:]]
    return replace(setting, most=most, members=members)


def take(run: Run, model: Model, event: Event, number: int, *, deferred: bool) -> None:
    """Takes a step, and compares what became of it."""
    setting = run.setting
    grads = gradients(setting.members, event, number, setting.dtype)
    if run.scaler is not None and grads[0] is None:
        grads[0] = torch.ones(7, dtype=setting.dtype)
    model.is_told = getattr(run.optimizer.optimizer, "_step_supports_amp_scaling", False)
    fate = model.step(grads, run.loss_of(event))
    in_a_row = model.counts["consecutive_skips"]
    raising: Any = nullcontext()
    if fate == "error":
        raising = pytest.raises(RuntimeError, match="non-finite")
    # Where a device decides, the watch looks at every step, also at one that overflows.
    is_looked_at = fate == "skip" or (
        fate == "overflow" and deferred and takes_found_inf(run.optimizer.optimizer)
    )
    if is_looked_at and setting.most is not None and in_a_row >= setting.most:
        raising = pytest.raises(RuntimeError, match=f"{in_a_row} steps in a row were skipped")
    with raising:
        for group in (*run.optimizer.param_groups, *run.bare.param_groups):
            group["lr"] = event.rate * run.bare.defaults["lr"]
        run.step(grads, event)
        assert fate == "unseen" or run.optimizer.loss is None
    if fate == "taken":
        run.assert_takes(model.grads, grads)
    elif fate == "error":
        scale = 1.0 if setting.scale is None else setting.scale
        given = [grad * scale for grad in grads if grad is not None]
        assert_bits([p.grad for p in run.params if p.grad is not None], given)


# Few of so many settings meet.
@settings(max_examples=3 * settings().max_examples)
@given(setting=SETTINGS, events=st.lists(EVENTS, min_size=2, max_size=9))
def test_a_run_is_that_of_the_model(backend, setting, events):
    setting = possible(setting)
    if backend.device.type == "cuda":
        # Raised steps later there.
        setting = replace(setting, most=None)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.csv"
        run, model = Run(setting, backend.device, path), Model(setting)
        seen: list[tuple[Tensor, Tensor]] = []
        run.assert_is(model)
        for number, event in enumerate(events):
            if event.kind == "save":
                run.save()
                model.setting = run.setting
                # Those of single groups are of steps that a checkpoint does not know.
                model.last = {name: model.last[name] for name in LAST}
            elif event.kind == "copy":
                run.copy()
            elif event.kind == "rule":
                model.rule = run.rule = run.optimizer.clip = event.rule
                model.limits.pop(None, None)
            elif event.kind == "own" and run.recorder is None:
                # A file keeps its columns.
                for at, group in enumerate(run.optimizer.param_groups):
                    if group.pop("clip", ABSENT) is not ABSENT:
                        model.own[at] = run.own[at] = ABSENT
                        break
            elif event.kind != "own":
                take(run, model, event, number, deferred=backend.deferred)
                last = run.optimizer.stats.last_norm, run.optimizer.stats.steps
                seen += [(one, one.clone()) for one in last]
                assert run.optimizer.stats.last_coefficient.dtype == last[0].dtype
            run.assert_is(model)
        # A logger may collect them and read them later; what it writes to them changes nothing.
        assert_bits((one for one, _ in seen), (one for _, one in seen))
        run.optimizer.stats.last_coefficient.fill_(7.0)
        run.optimizer.stats.steps.zero_()
        run.assert_is(model)
        if run.recorder is not None:
            run.recorder.close()
            assert_rows(path, model)


def assert_rows(path: Path, model: Model) -> None:
    """The recorder wrote the rows of the model; what has no number is NaN."""
    if not model.rows:
        assert not path.exists()
        return
    history = read(path)
    assert history.steps.tolist() == [*range(1, 1 + len(model.rows))]
    named = history.named_norms
    columns = {
        "norm": history.norms,
        "skipped": history.skipped,
        "loss": history.losses,
        **named,
    }
    for name, found in columns.items():
        expected = [row.get(name, NAN) for row in model.rows]
        assert found.tolist() == pytest.approx(expected, rel=1e-5, nan_ok=True), name
    for name, found in (("coefficient", history.coefficients), ("limit", history.limits)):
        # Of a step that is left out they are those that it would have had, or none.
        taken = [i for i, row in enumerate(model.rows) if not row["skipped"]]
        expected = [model.rows[i][name] for i in taken]
        assert found[taken].tolist() == pytest.approx(expected, rel=1e-5, nan_ok=True), name

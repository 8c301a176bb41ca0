"""Cases of speed: every provider clips right, a wrong result is not timed, and figures follow."""

import math
import subprocess

import pytest
import torch

from bench import timing
from bench.accuracy import Gradients, WrongResultError
from bench.comparison import Effort
from bench.providers import FRAMEWORKS, IN_PLACE, NAMED, OUT_OF_PLACE, Entry, Provider, in_place
from bench.speed import SUMMED, checked, compare
from bench.test_gpu import VERBS, verb
from bench.workloads import DTYPES, Workload
from helpers.absent_gpu import kernel_module, replaced_launch
from helpers.bench_cases import CPU, SMALL, figures


def wrong(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Clips to half of the limit, and returns no norm."""
    call = NAMED["torch"].make(gradients, rule, limit / 2).call

    def clip() -> None:
        call()

    return in_place(gradients, clip)


def lying(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Clips right and returns another norm."""
    call = NAMED["torch"].make(gradients, rule, limit).call
    return in_place(gradients, lambda: call() * 1.2)


@pytest.mark.parametrize("make", [wrong, lying])
def test_wrong_provider_is_refused_and_not_timed(make):
    gradients = Gradients(SMALL, "float32", CPU)
    provider = Provider("wrong", make)
    with pytest.raises(WrongResultError):
        checked(provider, gradients, "norm", True)
    compared = compare(gradients, "norm", True, [provider, NAMED["torch"]], Effort(2, 0.0), {})
    assert set(compared.faults) == {"wrong"}
    compared.take_turns()
    assert set(compared.samples) == {"torch"}


def test_figures_of_a_cpu():
    gradients = Gradients(SMALL, "float32", CPU)
    ours, torchs = figures(gradients, "norm", False, [NAMED["tritonclip"], NAMED["torch"]])
    assert (torchs["ratio"], ours["baseline"]) == (1.0, "torch")
    assert {"ratio_lo", "baseline_us"} <= ours.keys()
    assert not {"host_us", "device_us", "graph_us", "launches", "sum_share"} & ours.keys()


def test_large_lists_stand_beside_a_sum_of_as_many_bytes():
    short, long = (
        Gradients(Workload("one", "one", ((SUMMED // 4 + more,),)), "float32", CPU)
        for more in (0, 1)
    )
    (ours,) = figures(long, "value", False, [NAMED["tritonclip"]])
    assert 0 < ours["sum_share"] < math.inf
    for gradients, conditions in ((short, {}), (long, {"after": "backward pass"})):
        (ours,) = figures(gradients, "value", False, [NAMED["tritonclip"]], conditions)
        assert "sum_share" not in ours


def test_each_call_in_training_gets_gradients_that_a_backward_pass_made(monkeypatch):
    gradients = Gradients(SMALL, "float32", CPU)
    made, backward = [], gradients.backward

    def counted():
        made.append(True)
        backward()

    monkeypatch.setattr(gradients, "backward", counted)
    conditions = {"after": "backward pass", "busy": 2}
    compared = compare(gradients, "norm", False, [NAMED["tritonclip"]], Effort(2, 0.0), conditions)
    compared.take_turns()
    (own,) = compared.samples.values()
    assert len(made) >= own.n_calls * len(own.walls)
    assert compared.figures("tritonclip", compared.samples).items() >= conditions.items()


@pytest.mark.parametrize("call", VERBS)
def test_verb_launches_one_kernel(call, monkeypatch):
    """Of the benchmarks of a GPU, as far as they go without one."""
    pytest.importorskip("triton", reason="triton is not installed")
    launched: list[str] = []
    monkeypatch.setattr(kernel_module("launch"), "multiprocessors", lambda device: 1)
    with replaced_launch(lambda kernel, *_, **__: launched.append(kernel.fn.__name__)):
        launch = verb(call, Gradients(SMALL, "float32", CPU))
        launched.clear()
        launch()
    assert launched == [f"{call.replace(', ', '_')}_kernel"]


def served(providers):
    """Each provider, rule and dtype that fit."""
    return [
        pytest.param(one, rule, dtype, id=f"{one.name}-{rule}-{dtype}")
        for one in providers
        for rule in one.rules
        for dtype in DTYPES
        if one.why_absent(SMALL, dtype, "cpu") is None
    ]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("provider", "rule", "dtype"), served([*IN_PLACE, *FRAMEWORKS]))
def test_provider_clips_right(provider, rule, dtype):
    gradients = Gradients(SMALL, dtype, CPU)
    for clipped in (False, True):
        entry = checked(provider, gradients, rule, clipped)
        # A second call on the same gradients, refilled, gives the same.
        entry.refill()
        output = entry.call()
        limit = gradients.limit(rule, clipped)
        gradients.check(entry.result(output)[0], rule, limit, provider.tolerance)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("provider", "rule", "dtype"), served(OUT_OF_PLACE))
def test_functional_provider_clips_right_and_leaves_its_gradients(provider, rule, dtype):
    gradients = Gradients(SMALL, dtype, CPU)
    for clipped in (False, True):
        checked(provider, gradients, rule, clipped)
        assert all(map(torch.equal, gradients.grads, gradients.fresh))


def test_long_lists_are_not_compiled():
    long = Workload("long", "long", ((1,),) * 1001), "float32", "cpu"
    compiled = NAMED["optax"]._replace(modules=())
    assert "minutes" in str(compiled.why_absent(*long))
    assert NAMED["torch"].why_absent(*long) is None


@pytest.mark.parametrize("name", ["tritonclip", "torch"])
def test_a_step_clips_then_descends(name):
    gradients = Gradients(SMALL, "float32", CPU)
    checked(NAMED[name], gradients, "step", True)
    for parameter, fresh in zip(gradients.parameters, gradients.fresh, strict=True):
        torch.testing.assert_close(parameter.detach(), -1e-3 * fresh / 2, rtol=1e-4, atol=0)


def test_busy_cores_are_given_back(monkeypatch):
    started = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with timing.busy_cores(2):
        assert [process.poll() for process in started] == [None, None]
    assert None not in [process.poll() for process in started]

"""Cases of speed: every provider clips right, a wrong result is not timed, and figures follow."""

from __future__ import annotations

import math
import subprocess

import pytest
import torch

from bench import timing
from bench.accuracy import Gradients, WrongResultError
from bench.comparison import Effort
from bench.providers import IN_PLACE, NAMED, OUT_OF_PLACE, SUMMED, Entry, Provider, in_place
from bench.speed import bytes_moved, checked, compare, providers_of
from bench.test_gpu import VERBS, verb
from bench.workloads import DTYPES, Workload
from helpers.absent_gpu import kernel_module, replaced_launch
from helpers.bench_cases import CPU, SMALL, elements, figures

OURS = ("tritonclip", "torch", "torch foreach", "torch no foreach")


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
    provider = Provider("wrong", make, {"norm": 3})
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
    assert ours["bytes"] == 4 * elements(SMALL.shapes)
    assert torchs["bytes"] == 3 * ours["bytes"]
    known = {"ratio_lo", "gb_per_s", "copy_gb_per_s", "norm_error", "baseline_us"}
    assert known <= ours.keys()
    assert not {"host_us", "device_us", "graph_us", "launches", "sum_share"} & ours.keys()


def test_providers_are_those_that_were_asked_for_and_take_parameters_in_training():
    assert [one.name for one in providers_of(["torch"], False)] == ["tritonclip", "torch"]
    assert "torch sum" in {one.name for one in providers_of([], False)}
    assert {one.name for one in providers_of([], True)} == {"tritonclip wrapper", *OURS}


def test_large_lists_stand_beside_a_sum_of_as_many_bytes():
    short, long = (Workload("one", "one", ((SUMMED // 4 + more,),)) for more in (0, 1))
    providers = [NAMED["tritonclip"], NAMED["torch sum"]]
    assert "over 8 MiB only" in str(NAMED["torch sum"].why_absent(short, "float32", "cpu"))
    ours, total = figures(Gradients(long, "float32", CPU), "value", False, providers)
    assert 0 < ours["sum_share"] < math.inf
    assert total["sum_share"] == 1.0
    assert "ratio" not in total


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


def test_bytes_moved_follow_the_formula():
    size = 10_000
    gradients = Gradients(Workload("two", "two", ((size,), (8,))), "float32", CPU)
    n, ours, torchs = gradients.n_bytes, NAMED["tritonclip"], NAMED["torch"]
    assert bytes_moved(gradients, "norm", False, ours) == n
    assert bytes_moved(gradients, "norm", True, ours) == 3 * n
    # The limit is a quarter of the sum of both norms: the larger gradient alone is clipped.
    assert bytes_moved(gradients, "gradient", True, ours) == n + 2 * 4 * size
    assert bytes_moved(gradients, "value", False, ours) == n
    assert bytes_moved(gradients, "value", True, ours) == 2 * n
    assert bytes_moved(gradients, "value", True, torchs) == 4 * n
    assert bytes_moved(gradients, "norm", False, torchs) == 3 * n
    assert bytes_moved(gradients, "step", False, torchs) is None


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
        for rule in one.passes
        for dtype in DTYPES
        if one.why_absent(SMALL, dtype, "cpu") is None
    ]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("provider", "rule", "dtype"), served(IN_PLACE))
def test_provider_clips_right(provider, rule, dtype):
    gradients = Gradients(SMALL, dtype, CPU)
    for clipped in (False, True):
        entry, _ = checked(provider, gradients, rule, clipped)
        # A second call on the same gradients, refilled, gives the same.
        entry.refill()
        output = entry.call()
        limit = gradients.limit(rule, clipped) if provider.clips else torch.inf
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


@pytest.mark.parametrize("name", ["tritonclip", "tritonclip wrapper", "torch"])
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

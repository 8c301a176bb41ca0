"""The log of calls under `patch_torch`: turns, norms both ways, and what the report says."""

import math
from collections import Counter

import pytest
import torch

import tritonclip
from helpers.cases import grad_of, parameters
from helpers.workers import NEEDS_FORK, run_in_fork
from tritonclip.commands.call_log import CallLog, _List, _verdict
from tritonclip.integrations.patching import Call, TorchPatch

CPU = torch.device("cpu")


def clip_in(
    log: CallLog, n: int, sizes: tuple[int, ...] = (3,), device: torch.device = CPU
) -> None:
    """Clips lists of these sizes in turn, and checks each result."""
    with TorchPatch(None, log) as patch:
        for step in range(n):
            params = parameters([torch.full((sizes[step % len(sizes)],), 2.0, device=device)])
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            assert grad_of(params[0]).norm().item() == pytest.approx(1.0, rel=1e-5)
    assert not patch.served_by_torch


@pytest.mark.parametrize("sizes", [(3,), (3, 4), (3, 4, 5)], ids=len)
def test_functions_take_turns_on_each_list(sizes):
    """Also where several lists alternate, as those of a GAN."""
    log = CallLog(compares=True)
    clip_in(log, 48 * len(sizes), sizes)
    for calls in log._lists.values():
        torchs, ours = calls.n_served
        assert torchs + ours == calls.n_calls == 48
        assert abs(torchs - ours) <= 6
        # The rest was checked, or was the first.
        assert len(calls.walls[0]) >= torchs - 7
        assert calls.difference is not None
        assert calls.difference < 1e-6


def test_calls_are_compared_on_every_device(device):
    log = CallLog(compares=True)
    clip_in(log, 12, device=device)
    (calls,) = log._lists.values()
    assert calls.is_judged
    assert calls.device == device
    waits = "Each call waited for the GPU" in log.report(Counter(), failed=False)
    assert waits == (device.type == "cuda")


def test_a_norm_that_overflows_in_torch_is_said():
    log = CallLog(compares=True)
    with TorchPatch(None, log):
        for _ in range(40):
            params = parameters([torch.full((4,), 6e4, dtype=torch.float16)])
            torch.nn.utils.clip_grad_norm_(params, 1.0)
    report = log.report(Counter(), failed=False)
    assert "difference of the norms: inf" in report
    assert "A norm was finite by one function and inf or NaN by the other." in report


def test_other_functions_are_compared_too():
    log = CallLog(compares=True)
    with TorchPatch(None, log):
        for _ in range(40):
            params = parameters([torch.full((4,), 2.0)])
            norm = torch.nn.utils.get_total_norm([grad_of(p) for p in params])
            torch.nn.utils.clip_grads_with_norm_(params, 3.0, norm)
            assert grad_of(params[0]).sum().item() == pytest.approx(6.0, rel=1e-5)
            torch.nn.utils.clip_grad_value_(params[0], 1.0)
            assert grad_of(params[0]).tolist() == [1.0] * 4
    assert set(log.counts.values()) == {40}
    report = log.report(Counter(), failed=False)
    for name in ("get_total_norm", "clip_grads_with_norm_", "clip_grad_value_"):
        assert f"{name} of 1 gradients with 4 elements, 40 calls" in report


def test_a_log_of_few_calls_says_so():
    log = CallLog(compares=True)
    clip_in(log, 5)
    assert "too few calls to compare" in log.report(Counter(), failed=False)


def test_calls_of_threads_that_overlap_take_no_time_away():
    log = CallLog(compares=True)
    call = Call("clip_grad_norm_", print, abs, {"parameters": parameters([torch.ones(3)])})
    log(call)
    # Another one leaves a call after this one arrives.
    log._left += 10**12
    log(call)
    assert log._outside >= 0


def test_arguments_that_cannot_be_logged_are_torchs_to_refuse():
    log = CallLog(compares=True)
    params = parameters([torch.ones(3)])

    def said() -> str:
        with pytest.raises(TypeError) as error:
            torch.nn.utils.clip_grad_norm_(params, 1.0, [2.0])  # type: ignore[arg-type]
        return str(error.value)

    expected = said()
    with TorchPatch(None, log):
        assert said() == expected


def test_without_comparing_calls_are_counted_only():
    log = CallLog(compares=False)
    with TorchPatch(None, log):
        torch.nn.utils.clip_grad_norm_(parameters([torch.ones(3)]), 1.0)
    assert not log._lists
    assert log.counts == {"clip_grad_norm_": 1}


def test_compiled_calls_are_not_logged():
    torch._dynamo.reset()
    log = CallLog(compares=True)
    (param,) = parameters([torch.tensor([3.0, 4.0])])

    @torch.compile(backend="eager", fullgraph=True)
    def clip(param):
        return torch.nn.utils.clip_grad_norm_([param], 1.0)

    with TorchPatch(None, log):
        assert clip(param).item() == 5.0
    torch.testing.assert_close(grad_of(param), torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
    assert not log.counts


def test_torch_serves_a_process_whose_replicas_were_started_by_the_script(monkeypatch):
    """These are not run under the patch, and replicas have to be clipped alike."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    log = CallLog(compares=True)
    half = torch.full((4,), 6e4, dtype=torch.float16)
    with TorchPatch(None, log):
        with pytest.warns(tritonclip.ClippingWarning, match="the script started its other 3 of 4"):
            norm = torch.nn.utils.clip_grad_norm_(parameters([half]), 1.0)
        # By torch, whose norm overflows.
        assert math.isinf(norm.item())
        torch.nn.utils.clip_grad_norm_(parameters([half]), 1.0)
    assert "torchrun --nproc-per-node 4 -m tritonclip run" in log.report(Counter(), failed=False)


# Of launchers, with their number of processes; then whether a group of four was started by them.
LAUNCHED = [
    ({"RANK": "0", "WORLD_SIZE": "4"}, True),
    ({"RANK": "0", "WORLD_SIZE": "1"}, False),
    ({"RANK": "3"}, True),
    ({"RANK": ""}, False),
    # A job of one task, on a machine with four devices.
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
    ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, True),
]


@pytest.mark.parametrize(("variables", "are_patched"), LAUNCHED, ids=str)
def test_torch_serves_replicas_that_the_launcher_did_not_start(monkeypatch, variables, are_patched):
    """Also where calls came before the processes."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    log = CallLog(compares=False)
    clip_in(log, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    call = Call("clip_grad_norm_", print, abs, {})
    if are_patched:
        assert log(call)[0] is print
    else:
        with pytest.warns(tritonclip.ClippingWarning, match="the script started its other 3 of 4"):
            assert log(call)[0] is abs


@NEEDS_FORK
def test_torch_serves_replicas_that_are_forks(monkeypatch):
    """The process that forked may be one of them, and clips by torch."""
    monkeypatch.delenv("RANK", raising=False)
    log = CallLog(compares=False)

    def work() -> None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.warns(tritonclip.ClippingWarning, match="the script started its other 1 of 2"):
            assert log(Call("clip_grad_norm_", print, abs, {}))[0] is abs

    run_in_fork(work)


@pytest.mark.parametrize(
    ("torchs", "ours", "gap", "said"),
    [
        (100.0, 50.0, 900.0, "tritonclip helps: a call takes 50.0 us in place of 100 us, which"
         " saves 5.0% of the time of this run, 1% or more."),
        (100.0, 50.0, 1e6, "it hardly matters here: a call takes 50.0 us in place of 100 us,"
         " which saves 0.00% of the time of this run, less than 1%."),
        # Nothing but clipping, and an evaluation at each fourth call.
        (100.0, 50.0, (0.0, 0.0, 0.0, 39600.0),
         "which saves 0.50% of the time of this run, less than 1%."),
        (50.0, 100.0, 900.0, "tritonclip does not help the speed of this run"),
        (100.0, 100.0, 900.0, "It is not clear whether tritonclip helps"),
    ],
    ids=["helps", "does not matter", "evaluations", "slower", "equal"],
)  # fmt: skip
def test_the_verdict_is_one_sentence(torchs, ours, gap, said):
    calls = _List("clip_grad_norm_", 1, 4, CPU)
    for walls, middle in zip(calls.walls, (torchs, ours), strict=True):
        walls.extend(middle * (1 + 0.002 * (i % 5 - 2)) for i in range(50))
    gaps = gap * 25 if isinstance(gap, tuple) else [gap] * 100
    calls.n_calls = 100
    assert said in _verdict([calls], sum(gaps))


def test_the_verdict_does_not_call_times_equal_that_the_figures_show_to_differ():
    calls = _List("clip_grad_norm_", 1, 4, CPU, n_calls=8)
    calls.walls[0].extend([227.0, 900.0, 120.0])
    calls.walls[1].extend([100.0, 500.0, 60.0])
    said = _verdict([calls], 1e4)
    assert "about the same" not in said
    assert "100 us in place of 227 us, 2.27x, but times vary so much" in said


def test_the_verdict_is_of_all_lists():
    """One of many small ones saves little, and all of them save much."""
    lists = [_List("clip_grad_norm_", 1, 4, CPU, n_calls=100) for _ in range(50)]
    for calls in lists:
        calls.walls[0].extend([100.0, 101.0, 99.0] * 20)
        calls.walls[1].extend([50.0, 51.0, 49.0] * 20)
    assert "saves 25.0% of the time" in _verdict(lists, 5e5)


@pytest.mark.parametrize("kind", ["sizes", "subsets", "fresh"])
def test_lists_that_change_at_every_call_are_compared(kind):
    log = CallLog(compares=True)
    params = parameters([torch.ones(3) for _ in range(90)])
    with TorchPatch(None, log):
        for step in range(80):
            given = params[: step + 2]
            if kind == "sizes":
                given = parameters([torch.ones(3 + step)])
            elif kind == "fresh":
                given = parameters([torch.ones(3), torch.ones(4)])
            torch.nn.utils.clip_grad_norm_(given, 1.0)
    assert len(log._lists) <= 9
    report = log.report(Counter(), failed=False)
    assert "tritonclip  " in report
    assert ("of lists that change from call to call" in report) == (kind != "fresh")


def test_lists_of_one_size_are_compared_each():
    log = CallLog(compares=True)
    params = parameters([torch.ones(3) for _ in range(4)])
    with TorchPatch(None, log):
        for _ in range(40):
            for param in params:
                torch.nn.utils.clip_grad_norm_(param, 1.0)
    assert [calls.n_calls for calls in log._lists.values()] == [40] * 4
    assert all(calls.is_judged for calls in log._lists.values())

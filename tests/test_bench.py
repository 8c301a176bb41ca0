"""The benchmark suite: its lists, its check of results, and its rows; nothing here is timed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from bench import accuracy, clocks, lists, rows, suite
from bench.gradients import DTYPES, RULES, Gradients, WrongResultError
from bench.lists import LISTS, ParameterList
from bench.measure import bytes_moved, checked, measure, why_absent
from bench.rivals import RIVALS, Entry, Rival
from bench.suite import ALL

# What is published of the models; for the others, what their names say.
COUNTS = {
    "resnet50": (161, 25_557_032),
    "vit_b16": (152, 86_567_656),
    "gpt2_124m": (148, 124_439_808),
    "llama3_8b_full": (291, 8_030_261_248),
    "lora_r16": (448, 41_943_040),
    "tiny_10000": (10_000, 40_000),
}
CPU = torch.device("cpu")
SMALL = ParameterList("small", "small", ((5, 7), (3,), (1,), (257, 9)))
NAMED = {rival.name: rival for rival in ALL}


@pytest.fixture(autouse=True)
def little_copied(monkeypatch):
    monkeypatch.setitem(clocks.COPIED, "cpu", 2**16)


def quietly(gradients, rule, clipped, rivals, said):
    return measure(
        gradients,
        rule,
        clipped,
        rivals,
        repetitions=2,
        seconds=0.0,
        copy_gb_per_s=1.0,
        say=said.append,
    )


@pytest.mark.parametrize("name", COUNTS)
def test_list_has_the_published_size(name):
    found = LISTS[name]()
    assert (len(found.shapes), found.n_elements) == COUNTS[name]


@pytest.mark.parametrize("name", LISTS)
def test_list_has_the_name_it_is_known_by(name):
    assert LISTS[name]().name == name


def test_moe_has_all_tensors_and_unscaled_the_published_size():
    assert lists.moe(1).n_elements == 16_375_728_128
    assert len(lists.moe().shapes) == len(lists.moe(1).shapes) == 5466


def test_llama_share_is_a_32nd():
    share, whole = lists.llama3_8b().n_elements, lists.llama3_8b_full().n_elements
    # All but the last norm are divided.
    assert 32 * (share - 4096) == whole - 4096


def test_odd_is_odd_and_misaligned():
    assert all(shape[0] % 2 == 1 for shape in lists.odd().shapes)
    short = ParameterList("odd", "odd", ((3,),) * 7, misaligned=True)
    grads = Gradients(short, "float32", CPU).grads
    assert [g.data_ptr() % 32 // 4 for g in grads] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_equal_on_every_run(dtype):
    first, second = (Gradients(SMALL, dtype, CPU) for _ in range(2))
    for a, b in zip(first.grads, second.grads, strict=True):
        assert torch.equal(a, b)


def test_mixed_has_both_dtypes():
    dtypes = [g.dtype for g in Gradients(SMALL, "mixed", CPU).grads]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("rule", RULES)
def test_limit_clips_or_clips_nothing(rule):
    gradients = Gradients(SMALL, "float32", CPU)
    for clipped in (False, True):
        gradients.refill()
        checked(NAMED["torch"], gradients, rule, clipped)
        kept = all(map(torch.equal, gradients.grads, gradients.fresh))
        assert kept is not clipped


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [name for name in NAMED if not name.endswith("compiled")])
def test_rival_clips_right(name, rule, dtype):
    rival, gradients = NAMED[name], Gradients(SMALL, dtype, CPU)
    absent = why_absent(rival, gradients)
    if absent or rule not in rival.passes:
        pytest.skip(absent or "does not serve this rule")
    for clipped in (False, True):
        contender = checked(rival, gradients, rule, clipped)
        # A second call on the same gradients, refilled, gives the same.
        contender.entry.refill()
        output = contender.entry.call()
        limit = gradients.limit(rule, clipped) if rival.clips else None
        gradients.check(contender.entry.grads(output), rule, limit, rival.tolerance)


def wrong(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Clips to half of what it should."""
    entry = NAMED["torch"].make(gradients, rule, limit / 2)
    return Entry(gradients, entry.call)


def lying(gradients: Gradients, rule: str, limit: float) -> Entry:
    """Clips right and returns another norm."""
    call = NAMED["torch"].make(gradients, rule, limit).call
    return Entry(gradients, lambda: call() * 1.2, lambda norm: [float(norm)])


@pytest.mark.parametrize("make", [wrong, lying])
def test_wrong_rival_is_refused_and_not_timed(make):
    gradients = Gradients(SMALL, "float32", CPU)
    calls: list[str] = []

    def counted(given, rule, limit):
        entry = make(given, rule, limit)
        run = entry.call

        def call():
            calls.append(rule)
            return run()

        entry.call = call
        return entry

    rival = Rival("wrong", counted, {"norm": 3})
    with pytest.raises(WrongResultError):
        checked(rival, gradients, "norm", True)
    calls.clear()
    said: list[str] = []
    bad, good = quietly(gradients, "norm", True, [rival, NAMED["torch"]], said)
    assert len(calls) == 1
    assert (bad.correct, bad.wall_us, bad.repetitions) == (False, None, 0)
    assert good.correct
    assert good.wall_us is not None
    assert "wrong result, not timed" in said[0]


@pytest.mark.parametrize("limit", [1e-3, None])
def test_check_sees_nan_and_a_changed_element(limit):
    gradients = Gradients(SMALL, "float32", CPU)
    for spoil in (torch.nan, 1.0):
        grads = [f.clone() for f in gradients.fresh]
        if limit is not None:
            torch._foreach_clamp_max_(grads, limit)
            torch._foreach_clamp_min_(grads, -limit)
        gradients.check(grads, "value", limit, 0.0)
        grads[3][100, 3] = spoil
        with pytest.raises(WrongResultError, match="gradient 3"):
            gradients.check(grads, "value", limit, 1e-3)


def test_long_lists_are_not_compiled():
    gradients = Gradients(ParameterList("long", "long", ((1,),) * 1001), "float32", CPU)
    assert "minutes" in str(why_absent(NAMED["torch compiled"], gradients))
    assert why_absent(NAMED["torch"], gradients) is None


def test_measure_fills_what_a_cpu_has():
    gradients = Gradients(SMALL, "float32", CPU)
    found = quietly(gradients, "norm", False, (*RIVALS[:1], NAMED["torch"]), [])
    ours, torchs = found
    assert (ours.rival, torchs.rival, torchs.ratio) == ("tritonclip", "torch", 1.0)
    assert ours.bytes_moved == ours.gradient_bytes == 4 * SMALL.n_elements
    assert torchs.bytes_moved == 3 * torchs.gradient_bytes
    assert None not in (ours.wall_us, ours.ratio_lo, ours.extra_bytes, ours.gb_per_s)
    assert {ours.host_us, ours.device_us, ours.graph_us, ours.launches} == {None}


def test_bytes_moved_follow_the_formula():
    size = 10_000
    gradients = Gradients(ParameterList("two", "two", ((size,), (8,))), "float32", CPU)
    n, ours, torchs = gradients.n_bytes, NAMED["tritonclip"], NAMED["torch"]
    assert bytes_moved(gradients, "norm", False, ours) == n
    assert bytes_moved(gradients, "norm", True, ours) == 3 * n
    # The limit is a quarter of the sum of both norms: the larger gradient alone is clipped.
    assert bytes_moved(gradients, "gradient", True, ours) == n + 2 * 4 * size
    # On a CPU, whatever is clipped.
    for clipped in (False, True):
        small = (5 if clipped else 1) * 4 * 8
        assert bytes_moved(gradients, "value", clipped, ours) == 2 * 4 * size + small
        assert bytes_moved(gradients, "value", clipped, NAMED["tritonclip flat"]) == 2 * n
    assert bytes_moved(gradients, "value", True, torchs) == 4 * n
    assert bytes_moved(gradients, "norm", False, torchs) == 3 * n


def test_rows_go_to_json_and_come_back(tmp_path):
    row = rows.Row("a", 1, 2, 8, "float32", "norm", False, "torch", "cpu", wall_us=1.5)
    given = [row, replace(row, correct=True, ratio=0.75)]
    rows.write(tmp_path / "rows.json", {"torch": "2"}, given)
    assert rows.read(tmp_path / "rows.json") == ({"torch": "2"}, given)


def test_rows_refuse_what_json_has_no_number_for(tmp_path):
    row = rows.Row("a", 1, 2, 8, "float32", "norm", False, "torch", "cpu", wall_us=float("nan"))
    with pytest.raises(ValueError, match="JSON compliant"):
        rows.write(tmp_path / "rows.json", {}, [row])


def test_quick_suite_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(LISTS, "small", lambda: SMALL)
    out = tmp_path / "rows.json"
    threads = torch.get_num_threads()
    command = ["--quick", "--lists", "small", "--device", "cpu", "--repetitions", "2"]
    try:
        assert suite.main([*command, "--rivals", "torch", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    origin, found = rows.read(out)
    assert origin["device"] == "cpu"
    assert {(row.rule, row.clipped) for row in found} == {(r, c) for r in RULES for c in (0, 1)}
    assert {row.rival for row in found} == {"tritonclip", "torch"}
    assert all(row.correct for row in found)
    assert "small float32 norm clipped" in capsys.readouterr().out


def test_plans_hold_every_list_and_dtype():
    planned = suite.tasks(suite.arguments([]))
    assert {task.name for task in planned} == set(LISTS) - {"llama3_8b_full"}
    assert {task.dtype for task in planned} == set(DTYPES)


def test_accuracy_rows_go_to_json(tmp_path):
    out = tmp_path / "accuracy.json"
    threads = torch.get_num_threads()
    try:
        options = ["--shrink", "100000", "--device", "cpu", "--out", str(out)]
        assert accuracy.main(options) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(out.read_text())["rows"]
    assert found[0]["torch"] == "inf"
    assert all(row["ours_error"] < 1e-6 for row in found)

"""`python -m tritonclip suggest FILE` and `plot FILE`: what they print, and how bad input ends."""

import math
import random

import pytest
import torch

import tritonclip
from helpers.cases import parameters
from helpers.workers import python
from tritonclip.monitor.history import read


def test_suggest_prints_candidates_spikes_and_the_recommendation(spiky, run):
    suggestion = tritonclip.suggest_max_norm(spiky)
    printed = run("suggest", spiky).out
    lines = printed.splitlines()
    assert printed.endswith(f"\n{suggestion}\nmax_norm: {suggestion.max_norm:g}\n")
    assert suggestion.reason[:50] in printed
    for candidate in suggestion.candidates:
        (row,) = [line for line in lines if f"  {candidate.origin}  " in line]
        assert row.startswith(f"{candidate.max_norm:g} ")
        assert f" {candidate.share:.1%} " in row
        assert f"x {candidate.coefficients[0]:.3g} " in row
    for spike in suggestion.spikes:
        assert f"{spike.norm:.4g} at step {spike.step}" in printed


def test_suggest_says_where_no_step_stands_out(path, run):
    with tritonclip.record(path) as recorder:
        for step in range(100):
            recorder.add_(1.0 + step % 7 / 10 + step / 1e4)
    printed = run("suggest", path).out
    assert "The norms name no limit" in printed
    low, high = tritonclip.suggest_max_norm(path).range or (0.0, 0.0)
    assert printed.endswith(f"max_norm: none; to try: {low:g} to {high:g}\n")


def test_suggest_reads_a_column_that_is_named(spiky, run):
    table = spiky.with_name("theirs.csv")
    table.write_text(spiky.read_text().replace(",norm,", ",gnorm,", 1))
    assert "; --column" not in run("suggest", table, "--column", "gnorm").err
    assert run("suggest", table, "--column", "gnorm").out.endswith(
        run("suggest", spiky).out.splitlines()[-1] + "\n"
    )


def test_suggest_says_where_something_else_clipped(path, run):
    path.write_text("norm\n" + "".join(f"{min(1, 0.5 + i % 7 / 10)}\n" for i in range(99)))
    printed = run("suggest", path).out
    assert "something clips before the norm is measured" in printed
    assert printed.endswith("max_norm: none\n")
    assert "clips  " not in printed


def test_suggest_names_a_limit_beside_drift_as_second_best(path, run):
    norms = [(30 if i % 30 == 29 else 1 + i % 7 / 10) * 0.99**i for i in range(400)]
    path.write_text("norm\n" + "".join(f"{norm}\n" for norm in norms))
    assert run("suggest", path).out.endswith(", if the limit has to be fixed\n")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([], "no norm is NaN, inf or 0"),
        (["nan"], "left out: 1 that are NaN or inf"),
        (["0", "0"], "left out: 2 that are 0"),
    ],
    ids=["none", "nan", "zero"],
)
def test_suggest_counts_only_what_was_left_out(path, run, bad, said):
    path.write_text("\n".join(["norm", *bad, *(str(1 + i % 7) for i in range(40))]))
    assert f"; {said}.\n" in run("suggest", path).out


def test_suggest_leaves_out_the_warmup_that_is_given(spiky, run):
    printed = run("suggest", spiky, "--warmup", 100).out
    assert "by the norms of 500 steps, without a warm-up of 100 steps" in printed


@pytest.mark.parametrize("command", ["suggest", "plot"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a history file, got none"),
        ("loss\n1\n", "is not a history file: line 1: expected a column 'norm'"),
        ("", "is not a history file: expected at least one row"),
    ],
    ids=["missing", "other", "empty"],
)
def test_a_file_that_is_no_history_ends_with_a_message(path, run, command, text, message):
    if text is not None:
        path.write_text(text)
    printed = run(command, path, status=1)
    assert not printed.out
    assert printed.err.startswith("Error: ")
    assert message in printed.err
    assert "Traceback" not in printed.err


def test_a_command_that_fails_ends_the_program_with_status_1(path):
    failed = python("-m", "tritonclip", "suggest", str(path))
    assert failed.returncode == 1
    assert "expected a history file, got none" in failed.stderr


@pytest.mark.parametrize("options", [[], ["a.csv", "--warmup", "-1"]], ids=["no file", "warmup"])
def test_wrong_usage_ends_with_status_2(run, options):
    assert "usage: python -m tritonclip suggest" in run("suggest", *options, status=2).err


IMPORTED = """
import sys, torch
before = set(sys.modules)
import tritonclip

assert "tritonclip.advice.suggestion" not in sys.modules
tritonclip.suggest_max_norm([1.0 + i % 7 for i in range(99)])
extras = {"accelerate", "lightning", "matplotlib", "pandas", "rich", "scipy", "transformers"}
found = {name.split(".")[0] for name in set(sys.modules) - before}
assert not found & extras, found & extras
"""


def test_suggestion_is_imported_late_and_imports_no_extra():
    done = python("-c", IMPORTED)
    assert done.returncode == 0, done.stderr


def record_calls(path, clip):
    """A run of 300 steps under the patch, with two models: norms of some 0.01, and of some 200."""
    numbers = random.Random(0)
    torch.manual_seed(0)
    models = [parameters([torch.zeros(4) for _ in range(3)]) for _ in range(2)]
    with tritonclip.record(path) as recorder, tritonclip.patch_torch(recorder=recorder):
        for _ in range(300):
            for params, size in zip(models, (0.01, 200.0), strict=True):
                scale = (
                    size * numbers.lognormvariate(0, 0.3) * (20 if numbers.random() < 0.03 else 1)
                )
                for param in params:
                    param.grad = scale * torch.randn(4)
            clip(*models)


def clip(*args, **kwargs):
    torch.nn.utils.clip_grad_norm_(*args, **kwargs)


def limits_in(printed):
    lines = [line for line in printed.splitlines() if line.startswith("max_norm: ")]
    return [line.split()[1].strip(";") for line in lines]


def test_suggest_advises_for_each_of_two_models(path, run):
    record_calls(path, lambda small, large: (clip(iter(small), 1.0), clip(large, 1.0)))
    printed = run("suggest", path).out
    assert "List 1: 3 tensors, 12 elements, 300 calls\n" in printed
    small, large = map(float, limits_in(printed))
    assert 0.03 < small < 0.2
    assert 600 < large < 4000
    assert tritonclip.suggest_max_norm(path, list=1).max_norm == small
    assert tritonclip.suggest_max_norm(path, list="2: 3 tensors, 12 elements").max_norm == large
    assert limits_in(run("suggest", path, "--list", 2).out) == [f"{large:g}"]
    with pytest.raises(ValueError, match=r"list= .* got None .*'1: 3 tensors, 12 elements'; '2: 3"):
        tritonclip.suggest_max_norm(path)
    assert (
        "got '7' for a run with the lists '1: " in run("suggest", path, "--list", 7, status=1).err
    )


class GAN:
    """Two networks whose optimizers alternate: norms of some 0.01, and of some 200."""

    def __init__(self, *, alike: bool) -> None:
        torch.manual_seed(0)
        self.generator = torch.nn.Linear(4, 4)
        self.critic = torch.nn.Linear(4, 4 if alike else 1)
        both = (self.generator, self.critic)
        self.optimizers = {one: torch.optim.SGD(one.parameters(), lr=0.0) for one in both}

    def step(self, chosen: torch.nn.Linear, micro_batches: int = 1) -> None:
        for one in self.optimizers:
            one.requires_grad_(one is chosen)
        size = 200.0 if chosen is self.critic else 0.01
        self.optimizers[chosen].zero_grad()
        for _ in range(micro_batches):
            loss = (size * chosen(torch.randn(8, 4))).square().mean().sqrt()
            (loss / micro_batches).backward()
        clip(chosen.parameters(), 1.0)
        self.optimizers[chosen].step()

    def record(self, path, steps, *, resumed: int | None = None, micro_batches: int = 1) -> None:
        """A run whose critic takes four of five steps."""
        recorder = tritonclip.record(path)
        if resumed is not None:
            recorder.load_state_dict({"steps": resumed})
        with recorder, tritonclip.patch_torch(recorder=recorder):
            for step in steps:
                self.step(self.critic if step % 5 else self.generator, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 3], ids=["", "accumulation"])
@pytest.mark.parametrize("alike", [False, True])
def test_suggest_advises_for_both_networks_of_a_gan(path, run, alike, micro_batches):
    GAN(alike=alike).record(path, range(400), micro_batches=micro_batches)
    history = read(path)
    generator, critic = (
        "1: 2 tensors, 20 elements",
        f"2: 2 tensors, {20 if alike else 5} elements",
    )
    found = history.series()
    assert {name: len(one) for name, one in found.items()} == {critic: 320, generator: 80}
    assert float(found[generator].norms.max()) < 0.1
    assert float(found[critic].norms.min()) > 10
    printed = run("suggest", path).out
    for name, n in ((generator, 80), (critic, 320)):
        assert f"\nList {name}, {n} calls\nJudged by the norms of {n} steps" in printed


@pytest.mark.parametrize("first", [201, 202, 205])
def test_lists_of_a_resumed_run_go_on(path, first):
    """Also where another list is clipped first than in the process before."""
    GAN(alike=False).record(path, range(1, 211))
    rows = path.read_text().splitlines()
    GAN(alike=False).record(path, range(first, 401), resumed=first - 1)
    assert path.read_text().splitlines()[:first] == rows[:first]
    series = read(path).series()
    assert {name: len(one) for name, one in series.items()} == {
        "1: 2 tensors, 5 elements": 320,
        "2: 2 tensors, 20 elements": 80,
    }
    assert float(series["2: 2 tensors, 20 elements"].norms.max()) < 0.1


def test_lists_that_change_go_on_in_a_resumed_run(path):
    for resumed in (0, 60):
        recorder = tritonclip.record(path)
        recorder.load_state_dict({"steps": resumed})
        (fixed,) = parameters([torch.ones(2)])
        with recorder, tritonclip.patch_torch(recorder=recorder):
            for step in range(30):
                clip(parameters([torch.ones(3 + step + resumed)]), 1.0)
                clip(fixed, 1.0)
    series = read(path).series()
    assert len(series["2: 1 tensor, 2 elements"]) == 60
    assert len([name for name in series if "tensors that change" in name]) == 1
    assert len({name.partition(":")[0] for name in series}) == len(series)


def test_suggest_says_that_one_call_a_parameter_is_clip_by_norm(path, run):
    record_calls(path, lambda small, large: [clip(p, 1.0) for p in small + large])
    printed = run("suggest", path).out
    assert "6 of these lists are single tensors" in printed
    assert "ClipByNorm(max_norm)" in printed
    found = [*map(float, limits_in(printed))]
    assert len(found) == 6
    assert max(found[:3]) < 0.2 < 300 < min(found[3:])


@pytest.mark.parametrize(
    ("limit", "said"),
    [(math.inf, "its limit is inf"), (1e9, "its limit was never reached, and another order")],
    ids=str,
)
def test_suggest_gives_no_limit_for_a_norm_that_is_only_logged(path, run, limit, said):
    def step(_, large):
        clip(large, limit, norm_type=math.inf)
        clip(large, 1.0)

    record_calls(path, step)
    printed = run("suggest", path).out
    assert f"order inf, 300 calls: only logged, since {said}" in printed
    (found,) = map(float, limits_in(printed))
    assert 600 < found < 4000
    assert tritonclip.suggest_max_norm(path).max_norm == found


def test_suggest_advises_for_runs_that_only_measure(path, run):
    record_calls(path, lambda small, large: (clip(small, math.inf), clip(large, math.inf)))
    assert len(limits_in(run("suggest", path).out)) == 2


def test_suggest_separates_two_limits_of_one_list(path, run):
    """The second sees what the first left."""
    record_calls(path, lambda _, large: (clip(large, 300.0), clip(large, 100.0)))
    printed = run("suggest", path).out
    first, second = printed.split("elements, limit 300")
    assert "something clips before" in first
    assert "Clip at" in second


def test_suggest_takes_a_schedule_of_limits_for_one_series(path, run):
    limits = iter(range(10_000))
    record_calls(path, lambda small, _: clip(small, 1.0 + next(limits)))
    assert len(limits_in(run("suggest", path).out)) == 1


def test_suggest_counts_the_lists_that_it_does_not_show(path, run):
    params = parameters([torch.ones(2) for _ in range(9)])
    with tritonclip.record(path) as recorder, tritonclip.patch_torch(recorder=recorder):
        for step in range(30):
            for param in params:
                param.grad = torch.full((2,), 1.0 + step % 7)
                clip(param, 1.0)
    printed = run("suggest", path).out
    assert len(limits_in(printed)) == 6
    assert "\nand 3 lists with fewer calls" in printed


def test_lists_above_the_bound_are_not_recorded_with_one_warning(path, monkeypatch):
    monkeypatch.setattr("tritonclip.monitor.gradient_lists.MOST_LISTS", 2)
    params = parameters([torch.ones(2) for _ in range(4)])
    with tritonclip.record(path) as recorder, tritonclip.patch_torch(recorder=recorder):
        for param in params[:2]:
            clip(param, 1.0)
        with pytest.warns(tritonclip.ClippingWarning, match="further ones are not"):
            clip(params[2], 1.0)
        # Without another warning, which would be an error here.
        for param in params:
            clip(param, 1.0)
    assert recorder.steps == 4


pytest.importorskip("matplotlib", reason="needs tritonclip[monitor]")


@pytest.mark.parametrize("out", ["a.png", "a.svg", None])
def test_plot_writes_a_figure_and_prints_its_path(spiky, tmp_path, run, out):
    target = spiky.with_suffix(".png") if out is None else tmp_path / out
    options = [] if out is None else ["--out", target]
    assert run("plot", spiky, *options).out == f"{target}\n"
    assert target.stat().st_size > 5000


def test_plot_replaces_a_figure_only_where_it_is_named(spiky, run):
    target = spiky.with_suffix(".png")
    target.write_text("mine")
    assert f"write --out {target}" in run("plot", spiky, status=1).err
    assert target.read_text() == "mine"
    run("plot", spiky, "--out", target)
    assert target.stat().st_size > 5000


def test_plot_draws_a_run_that_is_too_short_for_a_suggestion(path, run):
    path.write_text("norm\n1\n2\n")
    assert "The figure has no candidates: expected at least 20" in run("plot", path).err
    assert path.with_suffix(".png").exists()


@pytest.mark.parametrize("package", ["matplotlib", "numpy"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(package):
    code = f"import sys; sys.modules[{package!r}] = None; from tritonclip.commands.cli import main"
    done = python("-c", f"{code}; sys.exit(main(['plot', 'a.csv']))")
    assert done.returncode == 1
    assert f"needs {package}, which is not installed" in done.stderr
    assert 'pip install "tritonclip[monitor]"' in done.stderr
    assert "tritonclip suggest works without it" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_file_ends_with_status_2(run):
    assert "usage: python -m tritonclip plot" in run("plot", "a.csv", "b.png", status=2).err


def test_plot_draws_the_list_with_most_calls_or_one_by_number(path, run):
    rows = [
        f'{step},{1 + step % 7},"{1 + step % 3 % 2}: 1 tensor, 2 elements"' for step in range(90)
    ]
    path.write_text("\n".join(["step,norm,list", *rows, ""]))
    assert "of the list 1: 1 tensor, 2 elements, one of 2" in run("plot", path).err
    assert not run("plot", path, "--list", 2, "--out", path.with_suffix(".svg")).err

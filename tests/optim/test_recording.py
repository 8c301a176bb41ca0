"""A wrapper with a recorder: every step in the file, with the norms of each parameter."""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import tritonclip
from helpers import reference
from helpers.cases import CHUNK, assert_bits, assert_norm, copies, grad_of, normal, parameters
from helpers.training import (
    count_readings,
    give_grads,
    new_params,
    sgd,
    step_on,
    unchanged,
    wrapped,
)
from helpers.workers import NEEDS_FORK, run_in_fork
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByQuantile,
    ClipByUnitNorm,
    ClipByValue,
    ClippedOptimizer,
)
from tritonclip.backends.native import NativeBatch


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def rows_after(
    path: Path,
    params: Any,
    rule: Any,
    prepare: Sequence[Callable[[], object]] = (lambda: None,),
    *,
    grad_scale: Any = None,
    **options: Any,
) -> list[dict[str, str]]:
    """The rows of steps, each after its preparation, on parameters or groups."""
    with tritonclip.record(path, each=True) as recorder:
        optimizer = ClippedOptimizer(sgd(params), rule, recorder=recorder, **options)
        for one in prepare:
            one()
            optimizer.step(grad_scale=grad_scale)
    return rows_of(path)


def each_of(row: dict[str, str]) -> Tensor:
    """The norms by name of a row, in order."""
    found = [float(cell) for name, cell in row.items() if name.startswith("norm/")]
    return torch.tensor(found, dtype=torch.float32)


def step_of(tmp_path: Path, params: Any, rule: Any = 1.0, **options: Any) -> dict[str, str]:
    """The row of one step with the gradients that are there."""
    (row,) = rows_after(tmp_path / "run.csv", params, rule, **options)
    return row


RULES = [
    pytest.param(ClipByGlobalNorm(0.5), id="global"),
    pytest.param(ClipByNorm(0.5), id="by-norm"),
    pytest.param(ClipByQuantile(), id="quantile"),
    pytest.param(ClipByOwnHistory(), id="own-history"),
    # The rule measures none, and the recorder the norm of all too.
    pytest.param(ClipByValue(0.5), id="by-value"),
    pytest.param(ClipByGlobalNorm(0.5, math.inf), id="global-inf"),
]


@pytest.mark.parametrize("rule", RULES)
def test_norms_take_a_reading_beside_that_of_the_norm_of_all(
    tmp_path, device, verbs, monkeypatch, rule
):
    params = new_params(device=device)
    grads = give_grads(params)
    readings = count_readings(monkeypatch, verbs)
    row = step_of(tmp_path, params, rule)
    assert len(readings) == 2
    assert_norm(each_of(row), reference.norms(grads))
    total = reference.total_norm(grads, 2.0 if rule.clamps else rule.norm_type)
    assert float(row["norm"]) == pytest.approx(total, rel=1e-6)


def test_norms_beside_norms_of_units(tmp_path, device):
    params = new_params(device=device)
    grads = give_grads(params)
    row = step_of(tmp_path, params, ClipByUnitNorm(0.5))
    assert_norm(each_of(row), reference.norms(grads))


def test_recording_changes_no_bit_of_a_step(tmp_path, device):
    sizes = (3, CHUNK + 1, 5 * CHUNK)
    trained = []
    path = tmp_path / "run.csv"
    for recorder in (None, tritonclip.record(path, each=True)):
        params = parameters([normal(n, device=device, seed=n) for n in sizes])
        optimizer = ClippedOptimizer(sgd(params), 0.1, recorder=recorder)
        optimizer.step()
        trained.append([*params, optimizer.stats.last_norm])
    assert_bits(*trained)


def test_nothing_waits_for_the_device():
    """Parameters whose values nobody can read: whoever asks for one gets a RuntimeError."""
    params = parameters([torch.empty(n, device="meta") for n in (3, 9000)])
    recorder = tritonclip.record("run.csv", each=True, write=False)
    optimizer = ClippedOptimizer(sgd(params), 1.0, recorder=recorder)
    for _ in range(2):
        optimizer.step()
    assert recorder.steps == 2


def groups_of(params: list[Tensor]) -> list[dict[str, Any]]:
    """One parameter under the shared rule, one under a rule, one that is not clipped."""
    rules: list[dict[str, Any]] = [{}, {"clip": ClipByNorm(0.5)}, {"clip": None}]
    return [{"params": [p], **rule} for p, rule in zip(params, rules, strict=True)]


def test_every_group_has_its_norms(tmp_path, device):
    params = new_params(device=device)
    grads = give_grads(params)
    row = step_of(tmp_path, groups_of(params))
    found = [float(row[f"norm/param_groups[{name}]['params'][0]"]) for name in range(3)]
    assert found == pytest.approx(reference.norms(grads), rel=1e-6)
    assert float(row["norm/group1"]) == pytest.approx(found[1], rel=1e-6)


def test_norms_are_of_gradients_divided_by_the_loss_scale(tmp_path, device):
    params = new_params(device=device)
    grads = give_grads(params)
    for param in params:
        grad_of(param).mul_(8)
    row = step_of(tmp_path, params, 1e9, grad_scale=torch.tensor(8.0, device=device))
    assert_norm(each_of(row), reference.norms(grads))


def test_parameters_without_a_gradient_or_to_be_left_out(tmp_path, device):
    params = new_params(device=device)

    def second():
        give_grads(params, 1)
        params[0].grad = None
        params[1].need_clip = False  # type: ignore[attr-defined]

    def third():
        for param in params:
            param.grad = None

    prepare = [lambda: give_grads(params), second, third]
    rows = rows_after(tmp_path / "run.csv", params, 1.0, prepare)
    cells = [[row[name] for name in row if name.startswith("norm/")] for row in rows]
    assert all(map(float, cells[0]))
    assert [cells[1][0], cells[1][1]] == ["0.0", ""]
    assert float(cells[1][2]) == pytest.approx(reference.norms([normal((), seed=12)])[0], rel=1e-6)
    assert cells[2] == ["0.0", "", "0.0"]


def test_a_gradient_of_two_parameters_counts_once(tmp_path, device):
    params = new_params(((3,), (3,)), device)
    params[0].grad = params[1].grad = normal(3, device=device)
    norm = reference.norms([grad_of(params[0])])[0]
    row = step_of(tmp_path, params, 1e9)
    first, second = (row[name] for name in row if name.startswith("norm/"))
    assert float(row["norm"]) == pytest.approx(norm, rel=1e-6)
    assert float(first) == pytest.approx(norm, rel=1e-6)
    assert second == "0.0"


def test_names_follow_parameters_that_are_exchanged(tmp_path):
    params = new_params()
    optimizer = ClippedOptimizer(SGD([("a", params[0]), ("b", params[1])], lr=0.1), 1.0)
    recorder = optimizer.recorder = tritonclip.record(tmp_path / "run.csv", each=True)
    step_on(params, optimizer)
    group = optimizer.param_groups[0]
    group["params"].append(params[2])
    group["param_names"] = ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"same names at every step.*different: c"):
        optimizer.step()
    recorder.close()


def test_parameters_that_share_a_name_share_a_norm(tmp_path, device):
    params = new_params(device=device)
    grads = give_grads(params)
    row = step_of(tmp_path, [{"params": [("weight", p)]} for p in params[:2]])
    assert float(row["norm/weight"]) == pytest.approx(reference.total_norm(grads[:2]), rel=1e-6)


@pytest.mark.parametrize("policy", ["error", "skip", "zero"])
def test_policies_for_nan_keep_the_norms(tmp_path, device, policy):
    params = new_params(device=device)
    grads = give_grads(params)
    row = step_of(tmp_path, params, ClipByGlobalNorm(0.5, 1.0), nonfinite=policy)
    assert_norm(each_of(row), reference.norms(grads))


def test_verification_covers_the_norms(tmp_path, monkeypatch):
    real = NativeBatch.combine
    monkeypatch.setattr(NativeBatch, "combine", lambda *args: real(*args) * 1.01)
    params = new_params()
    give_grads(params)
    before = copies(params)
    wrong = pytest.raises(tritonclip.VerificationError, match="norm of")
    with tritonclip.use_backend("native"), tritonclip.verify(), wrong:
        step_of(tmp_path, params)
    assert_bits(params, before)


def test_a_parameter_that_is_frozen_later_leaves_its_column_empty(tmp_path):
    with tritonclip.record(tmp_path / "run.csv", each=True) as recorder:
        params, optimizer = wrapped(sgd, recorder=recorder)
        step_on(params, optimizer)
        params[1].requires_grad_(False)
        params[1].grad = None
        optimizer.step()
    rows = rows_of(tmp_path / "run.csv")
    assert [row["norm/param_groups[0]['params'][1]"] == "" for row in rows] == [False, True]


def test_a_new_column_is_refused_before_the_step(tmp_path):
    with tritonclip.record(tmp_path / "run.csv") as recorder:
        params, optimizer = wrapped(sgd, recorder=recorder)
        step_on(params, optimizer)
        optimizer.param_groups[0]["clip"] = 1.0
        with pytest.raises(ValueError, match="same names"), unchanged(params, optimizer):
            optimizer.step()


def test_a_file_that_cannot_be_written_does_not_stop_training(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    recorder = tritonclip.record(folder / "run.csv", every=2)
    params, optimizer = wrapped(sgd, recorder=recorder)
    folder.rmdir()
    step_on(params, optimizer)
    with pytest.warns(RuntimeWarning, match="could not write") as caught:
        optimizer.step()
    optimizer.step()
    with pytest.warns(RuntimeWarning) as again:
        optimizer.step()
    # Which a filter shows once.
    assert str(again[0].message) == str(caught[0].message)
    folder.mkdir()
    recorder.close()
    assert len(rows_of(folder / "run.csv")) == 4


@NEEDS_FORK
def test_a_fork_trains_on_without_the_recorder(tmp_path):
    path = tmp_path / "run.csv"
    with tritonclip.record(path) as recorder:
        params, optimizer = wrapped(sgd, recorder=recorder)
        step_on(params, optimizer)

        def work() -> None:
            with pytest.warns(RuntimeWarning, match="a fork has no recorder"):
                optimizer.step()
            optimizer.step()

        run_in_fork(work)
        optimizer.step()
    assert len(rows_of(path)) == 2

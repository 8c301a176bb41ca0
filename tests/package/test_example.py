"""The example trains, reports and draws, and refuses bad arguments."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from examples import train_rnn

pytestmark = pytest.mark.usefixtures("fixed_width")

NAMES = [name for name, *_ in train_rnn.RUNS]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_main_learns_only_with_clipping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "curves.png"

    unclipped, *clipped = train_rnn.main(["--quick", "--output", str(path)])

    assert path.read_bytes().startswith(PNG_SIGNATURE)
    # Over seeds 0 to 3: at most 0.37 without clipping, at least 0.77 with it.
    assert all(run.accuracy > unclipped.accuracy + 0.2 for run in clipped)
    assert [run.diverged_at for run in clipped] == [None] * 3
    assert unclipped.clipped_share == 0
    assert all(run.clipped_share > 0.5 for run in clipped)
    report = capsys.readouterr().out
    for name, run in zip(NAMES, (unclipped, *clipped), strict=True):
        (row,) = (line for line in report.splitlines() if line.startswith(f"│ {name}"))
        assert f"{run.accuracy:.1%}" in row
    assert str(path) in report


def test_report_survives_divergence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        train_rnn, "QUICK", replace(train_rnn.QUICK, steps=4, learning_rate=float("inf"))
    )
    path = tmp_path / "curves.png"

    histories = train_rnn.main(["--quick", "--output", str(path)])

    assert [run.diverged_at for run in histories] == [2] * 4
    assert [len(run.losses) for run in histories] == [1] * 4
    assert capsys.readouterr().out.count("diverged at step 2") == 4
    assert path.read_bytes().startswith(PNG_SIGNATURE)


def test_report_survives_no_finite_step(tmp_path: Path) -> None:
    nothing = train_rnn.History([], [], diverged_at=1, clipped_share=0.0, accuracy=0.1)

    table = train_rnn.make_table([nothing] * 4)
    train_rnn.draw([nothing] * 4, tmp_path / "curves.png")

    assert table.row_count == 4
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--output", "curves.gif"], "must be a file that ends in .png, got curves.gif"),
        (["--output", "{folder}.png"], "must be a file that ends in .png"),
        (["--output", "{file}/curves.png"], "--output: cannot make the folder"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
    ids=["no-steps", "steps-not-a-number", "not-png", "output-is-folder", "no-folder", "unknown"],
)
def test_main_refuses_bad_arguments(
    arguments: list[str], message: str, refusal: Callable[..., str]
) -> None:
    assert message in refusal(train_rnn.main, arguments)

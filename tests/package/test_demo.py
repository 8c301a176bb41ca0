"""`make demo` ends with what it has shown, in numbers of its run, and with a command that works."""

import math
from pathlib import Path

import pytest

from examples import train_rnn, train_transformer
from examples.__main__ import main
from tritonclip import cli

pytestmark = pytest.mark.usefixtures("fixed_width")


def digits(accuracy: float) -> train_rnn.History:
    return train_rnn.History([2.3, 1.0], [5.0, 4.0], None, 0.5, accuracy)


def text(last_loss: float) -> train_transformer.History:
    """A run of 200 steps, of which 5% have outliers."""
    losses = [4.6] * 100 + [last_loss] * 100
    norms = [9.0 if step % 20 == 19 else 0.8 + step % 7 / 20 for step in range(200)]
    clipped = [norm > 1.0 for norm in norms]
    return train_transformer.History(losses, norms, [1.0] * 200, clipped, [False] * 200)


def test_demo_ends_with_the_result_the_figures_and_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [[2.5, math.nan], *[[2.5, 2.5]] * 3, [2.5, math.nan], [math.nan, math.nan]]
    names = [way.name for way in train_transformer.WAYS]
    runs = dict(zip(names, ([text(loss) for loss in both] for both in losses), strict=True))
    accuracies = [0.123, 0.914, 0.886, 0.931]
    monkeypatch.setattr(train_rnn, "train_all", lambda _: [*map(digits, accuracies)])
    monkeypatch.setattr(train_transformer, "train_all", lambda _: runs)
    monkeypatch.chdir(tmp_path)

    # The second time over the files of the first.
    for _ in range(2):
        main()

    *_, first, second, _, figures, following = capsys.readouterr().out.splitlines()
    assert first == (
        "The RNN reads 12% of the test digits without clipping, 91% with ClipByGlobalNorm(1.0), "
        "89% with ClipByNorm(0.5), 93% with ClipByValue(0.01)."
    )
    assert second == (
        "The transformer diverges in 1 of 2 runs without clipping, in 2 of 2 runs with outliers "
        "skipped, and in 1 of 8 runs with a limit."
    )
    for figure in figures.removeprefix("Figures: ").split(", "):
        assert Path(figure).stat().st_size
    arguments = following.partition(" -m tritonclip ")[2].split()
    assert cli.main(arguments) == 0
    assert "200 steps" in capsys.readouterr().out

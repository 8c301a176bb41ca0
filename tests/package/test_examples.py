"""The examples train, report and refuse bad arguments; `make demo` ends with their results."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import rich
import torch

from examples import find_limit, train_rnn, train_transformer
from examples.__main__ import main
from examples.train_transformer import QUICK, WARMUP, WAYS, History, Settings
from tritonclip.commands import cli
from tritonclip.monitor.history import read


@pytest.fixture
def fixed_width() -> None:
    """Reports are the same in every terminal."""
    rich.reconfigure(width=100)


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The message of an example that ends for its arguments, which may name {folder} and {file}."""
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    names = {"folder": tmp_path / "folder", "file": tmp_path / "file"}

    def message(main: Callable[[list[str]], object], arguments: list[str]) -> str:
        with pytest.raises(SystemExit) as caught:
            main([argument.format(**names) for argument in arguments])
        assert caught.value.code == 2
        return capsys.readouterr().err

    return message


# One worker trains the transformer for all.
pytestmark = [pytest.mark.usefixtures("fixed_width"), pytest.mark.xdist_group("transformer")]

NAMES = [name for name, *_ in train_rnn.RUNS]
WAY_NAMES = [way.name for way in WAYS]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_main_learns_only_with_clipping(tmp_path, capsys):
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


def test_report_survives_divergence(tmp_path, capsys, monkeypatch):
    quick = replace(train_rnn.QUICK, steps=4, learning_rate=math.inf)
    monkeypatch.setattr(train_rnn, "QUICK", quick)
    path = tmp_path / "curves.png"

    histories = train_rnn.main(["--quick", "--output", str(path)])

    assert [run.diverged_at for run in histories] == [2] * 4
    assert [len(run.losses) for run in histories] == [1] * 4
    assert capsys.readouterr().out.count("diverged at step 2") == 4
    assert path.read_bytes().startswith(PNG_SIGNATURE)


def test_report_survives_no_finite_step(tmp_path):
    nothing = train_rnn.History([], [], diverged_at=1, clipped_share=0.0, accuracy=0.1)

    table = train_rnn.make_table([nothing] * 4)
    train_rnn.draw([nothing] * 4, tmp_path / "curves.png")

    assert table.row_count == 4
    assert (tmp_path / "curves.png").exists()


def test_the_limit_that_is_found_wins(capsys, monkeypatch):
    # A part of the example's work: one seed for the search, another to compare.
    monkeypatch.setattr(find_limit, "SEARCH_SEEDS", (10,))
    monkeypatch.setattr(find_limit, "SEEDS", (0,))

    said = find_limit.main(["--steps", "40"])

    (without_high, with_low) = (int(share) for share in re.findall(r"(\d+)%", said)[1:3])
    assert with_low > without_high + 20
    assert said.startswith("The limit that was found for a shorter training of it is ")
    assert "recommended" in capsys.readouterr().out


@pytest.fixture(scope="module")
def quick() -> dict[str, list[History]]:
    """The runs of --quick."""
    return train_transformer.train_all(QUICK)


def test_quick_learns_more_under_a_limit(quick):
    (unclipped,), (fixed,), (suggested,), *_ = quick.values()

    # From seeds 0 to 3: at most 2.67 under either limit, at least 3.33 without clipping.
    assert fixed.final_loss < 2.9
    assert suggested.final_loss < 2.9
    assert unclipped.final_loss > 3.1


def test_quick_suggests_a_limit_for_the_tail(quick):
    (recorded,), (suggested,) = quick["fixed limit 1.0"], quick["suggested limit"]

    (limit,) = set(suggested.limits)
    # The README's advice, in both runs; the suggestion's own warm-up ends before this one.
    assert 0.01 <= fmean(norm > limit for norm in recorded.norms[WARMUP // 3 :]) <= 0.1
    assert 0.01 <= fmean(suggested.clipped[WARMUP:]) <= 0.1
    assert suggested.clipped == [norm > limit for norm in suggested.norms]


def test_quick_skips_outliers_only_where_told(quick):
    assert any(quick["skipped outliers"][0].skipped)
    assert not any(any(quick[name][0].skipped) for name in WAY_NAMES[:-1])
    assert not any(quick["no clipping"][0].clipped)


def test_main_reports_and_draws(quick, tmp_path, capsys, monkeypatch):
    seen = []

    def train_all(settings):
        seen.append(settings)
        return quick

    monkeypatch.setattr(train_transformer, "train_all", train_all)
    path = tmp_path / "new" / "figure.png"

    train_transformer.main(["--quick", "--learning-rate", "0.3", "--output", str(path)])

    assert seen == [Settings(QUICK.steps, QUICK.seeds, learning_rate=0.3)]
    assert path.read_bytes().startswith(PNG_SIGNATURE)
    report = capsys.readouterr().out
    for name, (run,) in quick.items():
        (row,) = (line for line in report.splitlines() if line.startswith(f"│ {name}"))
        assert f"{run.final_loss:.2f}".replace("inf", "diverged") in row
        assert f"{sum(run.spikes())} of {len(run.spikes())}" in row
        assert f"{fmean(run.clipped[WARMUP:]):.1%}" in row
    assert str(path) in report
    history = read(path.with_suffix(".csv"))
    (recorded,) = quick["fixed limit 1.0"]
    assert history.norms.tolist() == recorded.norms
    assert history.limits.tolist() == recorded.limits


def test_train_repeats_itself_and_starts_anew_from_another_seed():
    text = train_transformer.load_text(torch.device("cpu"))
    settings = Settings(steps=3)

    first, again, other = (
        train_transformer.train(WAYS[0], seed, text, settings, lambda: None) for seed in (0, 0, 1)
    )

    assert first == again
    assert first.losses[0] != other.losses[0]


def test_report_of_the_transformer_survives_divergence(tmp_path):
    losses = [4.6] * 100 + [math.nan] * 100
    norms = [1.0] * 90 + [10.0**i for i in range(10)] + [math.nan] * 100
    run = History(losses, norms, [math.inf] * 200, [False] * 200, [False] * 200)

    table = train_transformer.make_table(dict.fromkeys(WAY_NAMES, [run] * 2))
    train_transformer.draw(dict.fromkeys(WAY_NAMES, [run] * 2), tmp_path / "figure.png")

    assert run.final_loss == math.inf
    assert list(table.columns[1].cells) == ["diverged diverged"] * 6
    assert list(table.columns[2].cells) == ["0 of 2"] * 6
    assert (tmp_path / "figure.png").exists()


@pytest.mark.parametrize(
    ("spikes", "loss_after", "expected"),
    [
        pytest.param([], 2.0, [], id="none"),
        pytest.param([100], 2.1, [True], id="survived"),
        pytest.param([100], 2.3, [False], id="not-survived"),
        pytest.param([100, 110, 130], 2.0, [True], id="one-of-three"),
        pytest.param([100, 126], 2.0, [True, True], id="two"),
        pytest.param([20], 2.0, [], id="at-the-start"),
        pytest.param([270], 2.0, [], id="at-the-end"),
    ],
)
def test_spikes_are_judged_by_the_loss_after_them(spikes, loss_after, expected):
    losses = [2.0] * 100 + [loss_after] * 200
    norms = [4.5 if step in spikes else 1.0 for step in range(300)]
    nothing = [False] * 300

    assert History(losses, norms, [1.0] * 300, nothing, nothing).spikes() == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "curves.gif"], "must be a file that ends in .png, got curves.gif"),
        (["--output", "{folder}.png"], "must be a file that ends in .png"),
        (["--output", "{file}/curves.png"], "--output: cannot make the folder"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
    ids=["not-png", "output-is-folder", "no-folder", "unknown"],
)
@pytest.mark.parametrize("example", [train_rnn, train_transformer], ids=["rnn", "transformer"])
def test_main_refuses_bad_arguments(example, arguments, message, refusal):
    assert message in refusal(example.main, arguments)


RATE = "--learning-rate"


@pytest.mark.parametrize(
    ("example", "option", "value", "message"),
    [
        (train_rnn, "--steps", "0", "--steps must be at least 1, got 0"),
        (train_rnn, "--steps", "many", "invalid int value: 'many'"),
        (train_transformer, RATE, "0", f"{RATE} must be in (0, 10], got 0"),
        (train_transformer, RATE, "nan", f"{RATE} must be in (0, 10], got nan"),
        (train_transformer, RATE, "much", "invalid float value: 'much'"),
    ],
    ids=["no-steps", "steps-word", "no-rate", "rate-nan", "rate-word"],
)
def test_main_refuses_bad_numbers(example, option, value, message, refusal):
    assert message in refusal(example.main, [option, value])


def digits(accuracy: float) -> train_rnn.History:
    return train_rnn.History([2.3, 1.0], [5.0, 4.0], None, 0.5, accuracy)


def text(last_loss: float) -> train_transformer.History:
    """A run of 200 steps, of which 5% have outliers."""
    losses = [4.6] * 100 + [last_loss] * 100
    norms = [9.0 if step % 20 == 19 else 0.8 + step % 7 / 20 for step in range(200)]
    clipped = [norm > 1.0 for norm in norms]
    return train_transformer.History(losses, norms, [1.0] * 200, clipped, [False] * 200)


def test_demo_ends_with_the_result_the_figures_and_the_next_command(tmp_path, capsys, monkeypatch):
    losses = [[2.5, math.nan], *[[2.5, 2.5]] * 3, [2.5, math.nan], [math.nan, math.nan]]
    runs = dict(zip(WAY_NAMES, ([text(loss) for loss in both] for both in losses), strict=True))
    accuracies = [0.123, 0.914, 0.886, 0.931]
    monkeypatch.setattr(train_rnn, "train_all", lambda _: [*map(digits, accuracies)])
    monkeypatch.setattr(train_transformer, "train_all", lambda _: runs)
    monkeypatch.setattr(find_limit, "main", lambda: "found")
    monkeypatch.chdir(tmp_path)

    # The second time over the files of the first.
    for _ in range(2):
        main()

    *_, first, second, third, _, figures, following = capsys.readouterr().out.splitlines()
    assert first == (
        "The RNN reads 12% of the test digits without clipping, 91% with ClipByGlobalNorm(1.0), "
        "89% with ClipByNorm(0.5), 93% with ClipByValue(0.01)."
    )
    assert second == (
        "The transformer diverges in 1 of 2 runs without clipping, in 2 of 2 runs with outliers "
        "skipped, and in 1 of 8 runs with a limit."
    )
    assert third == "found"
    for figure in figures.removeprefix("Figures: ").split(", "):
        assert Path(figure).stat().st_size
    arguments = following.partition(" -m tritonclip ")[2].split()
    assert cli.main(arguments) == 0
    assert "200 steps" in capsys.readouterr().out

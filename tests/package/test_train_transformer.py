"""The example with spikes trains, suggests, reports and draws, and refuses bad arguments."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import torch

from examples import train_transformer
from examples.train_transformer import QUICK, WARMUP, WAYS, History, Settings
from tritonclip.monitor.history import read

# One worker trains for all.
pytestmark = [pytest.mark.usefixtures("fixed_width"), pytest.mark.xdist_group("transformer")]

NAMES = [way.name for way in WAYS]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def quick() -> dict[str, list[History]]:
    """The runs of --quick."""
    return train_transformer.train_all(QUICK)


def test_quick_learns_more_under_a_limit(quick: dict[str, list[History]]) -> None:
    (unclipped,), (fixed,), (suggested,), *_ = quick.values()

    # From seeds 0 to 3: at most 2.67 under either limit, at least 3.33 without clipping.
    assert fixed.final_loss < 2.9
    assert suggested.final_loss < 2.9
    assert unclipped.final_loss > 3.1


def test_quick_suggests_a_limit_for_the_tail(quick: dict[str, list[History]]) -> None:
    (recorded,), (suggested,) = quick["fixed limit 1.0"], quick["suggested limit"]

    (limit,) = set(suggested.limits)
    # The README's advice, in both runs; the suggestion's own warm-up ends before this one.
    assert 0.01 <= fmean(norm > limit for norm in recorded.norms[WARMUP // 3 :]) <= 0.1
    assert 0.01 <= fmean(suggested.clipped[WARMUP:]) <= 0.1
    assert suggested.clipped == [norm > limit for norm in suggested.norms]


def test_quick_skips_outliers_only_where_told(quick: dict[str, list[History]]) -> None:
    assert any(quick["skipped outliers"][0].skipped)
    assert not any(any(quick[name][0].skipped) for name in NAMES[:-1])
    assert not any(quick["no clipping"][0].clipped)


def test_main_reports_and_draws(
    quick: dict[str, list[History]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def train_all(settings: Settings) -> dict[str, list[History]]:
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


def test_train_repeats_itself_and_starts_anew_from_another_seed() -> None:
    text = train_transformer.load_text(torch.device("cpu"))
    settings = Settings(steps=3)

    first, again, other = (
        train_transformer.train(WAYS[0], seed, text, settings, lambda: None) for seed in (0, 0, 1)
    )

    assert first == again
    assert first.losses[0] != other.losses[0]


def test_report_survives_divergence(tmp_path: Path) -> None:
    losses = [4.6] * 100 + [math.nan] * 100
    norms = [1.0] * 90 + [10.0**i for i in range(10)] + [math.nan] * 100
    run = History(losses, norms, [math.inf] * 200, [False] * 200, [False] * 200)

    table = train_transformer.make_table(dict.fromkeys(NAMES, [run] * 2))
    train_transformer.draw(dict.fromkeys(NAMES, [run] * 2), tmp_path / "figure.png")

    assert run.final_loss == math.inf
    assert list(table.columns[1].cells) == ["diverged diverged"] * 6
    assert list(table.columns[2].cells) == ["0 of 2"] * 6
    assert (tmp_path / "figure.png").exists()


@pytest.mark.parametrize(
    ("spikes", "loss_after", "expected"),
    [
        ([], 2.0, []),
        ([100], 2.1, [True]),
        ([100], 2.3, [False]),
        ([100, 110, 130], 2.0, [True]),
        ([100, 126], 2.0, [True, True]),
        ([20], 2.0, []),
        ([270], 2.0, []),
    ],
    ids=["none", "survived", "not-survived", "one-of-three", "two", "at-the-start", "at-the-end"],
)
def test_spikes_are_judged_by_the_loss_after_them(
    spikes: list[int], loss_after: float, expected: list[bool]
) -> None:
    losses = [2.0] * 100 + [loss_after] * 200
    norms = [4.5 if step in spikes else 1.0 for step in range(300)]
    nothing = [False] * 300

    assert History(losses, norms, [1.0] * 300, nothing, nothing).spikes() == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning-rate", "0"], "--learning-rate must be in (0, 10], got 0"),
        (["--learning-rate", "nan"], "--learning-rate must be in (0, 10], got nan"),
        (["--learning-rate", "much"], "invalid float value: 'much'"),
        (["--output", "curves.gif"], "must be a file that ends in .png, got curves.gif"),
        (["--output", "{folder}.png"], "must be a file that ends in .png"),
        (["--output", "{file}/curves.png"], "--output: cannot make the folder"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
    ids=["no-rate", "rate-nan", "rate-word", "not-png", "output-is-folder", "no-folder", "unknown"],
)
def test_main_refuses_bad_arguments(
    arguments: list[str], message: str, refusal: Callable[..., str]
) -> None:
    assert message in refusal(train_transformer.main, arguments)

"""The figure of a run: what is in it, and that it is drawn where there is little to draw."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tritonclip.advice.suggestion import suggest_max_norm
from tritonclip.messages import printable
from tritonclip.monitor.history import History

pytest.importorskip("matplotlib", reason="needs tritonclip[monitor]")

from matplotlib.colors import to_hex

from tritonclip.advice import plot


def run(n: int = 400) -> History:
    """Norms around 1 with spikes, clipped at a limit; some steps skipped, zero or not finite."""
    generator = torch.Generator().manual_seed(0)
    norms = torch.exp(0.2 * torch.randn(n, generator=generator, dtype=torch.float64))
    norms[::40] = torch.arange(10.0, 20.0, dtype=torch.float64)
    skipped = torch.zeros(n, dtype=torch.float64)
    skipped[80] = 1
    norms[[7, 9]], norms[11] = math.nan, 0.0
    norms[13] = math.inf
    columns = {"norm": norms, "limit": torch.full_like(norms, 2.0), "skipped": skipped}
    return History({"step": torch.arange(1001, n + 1001), **columns})


def changed(history: History, **columns: torch.Tensor) -> History:
    """The history with other columns."""
    return replace(history, columns={**history.columns, **columns})


def in_runs(history: History, *begins: int) -> History:
    """The history with a run from each of these positions on."""
    number = torch.zeros(len(history))
    number[[0, *begins]] = 1
    return changed(history, run=number.cumsum(0))


@pytest.fixture
def figure():
    history = run()
    return plot.draw(history, suggest_max_norm(history, warmup=0))


def texts(artists):
    return [text.get_text() for text in artists]


def line(figure, label):
    """Steps and heights of the marks with a label in the legend."""
    (found,) = [one for one in figure.axes[0].lines if one.get_label() == label]
    return [int(step) for step in found.get_xdata()], [float(y) for y in found.get_ydata()]


def test_norms_are_on_a_log_axis_over_steps(figure):
    history = run()
    steps, norms = line(figure, "norm")
    shown = history.norms.isfinite() & (history.norms > 0)
    assert figure.axes[0].get_yscale() == "log"
    assert steps == history.steps[shown].tolist()
    assert norms == history.norms[shown].tolist()
    low, high = figure.axes[0].get_ylim()
    assert low < min(norms)
    assert max(norms) < high


def test_the_limit_is_drawn(figure):
    steps, limits = line(figure, "limit")
    assert steps == list(range(1001, 1401))
    assert set(limits) == {2.0}


def test_losses_stand_under_the_norms_where_there_are_any(figure):
    history = run()
    losses = torch.linspace(3.0, 1.0, 400, dtype=torch.float64)
    losses[5], losses[399] = math.nan, 1e9
    with_losses = plot.draw(changed(history, loss=losses))
    assert len(with_losses.axes) == len(figure.axes) + 1
    below: Any = with_losses.axes[2]
    assert below.get_ylabel() == "loss"
    (drawn,) = below.lines
    assert drawn.get_xdata().tolist() == history.steps.tolist()
    assert below.get_xlim() == with_losses.axes[0].get_xlim()
    # One that exploded leaves the others their room.
    assert 3.0 < below.get_ylim()[1] < 4.0


def test_a_limit_that_follows_the_norm_is_drawn_as_it_was():
    history = run()
    limits = torch.linspace(4.0, 1.0, 400, dtype=torch.float64)
    limits[:3] = math.inf
    drawn = line(plot.draw(changed(history, limit=limits)), "limit")[1]
    assert all(map(math.isnan, drawn[:3]))
    assert drawn[3:] == limits[3:].tolist()


def test_steps_are_marked_by_what_happened_to_them(figure):
    clipped, norms = line(figure, "clipped")
    assert clipped == [1001 + i for i in range(0, 400, 40) if i != 80]
    assert norms == [10.0, 11.0, *range(13, 20)]
    assert line(figure, "skipped") == ([1081], [12.0])
    nonfinite, heights = line(figure, "NaN or inf")
    assert nonfinite == [1008, 1010, 1014]
    assert all(0.9 < height <= 1 for height in heights)
    assert line(figure, "zero")[0] == [1012]
    history = run()
    spikes, norms = line(figure, "over 6 sigma, SpikeScore 1.5%")
    assert spikes == history.steps[history.is_over_six_sigma].tolist()
    assert norms == history.norms[history.is_over_six_sigma].tolist()


def test_marks_differ_in_colour_and_shape(figure):
    marks = [one for one in figure.axes[0].lines if one.get_marker() != "None"]
    assert len(marks) == 5
    assert len({one.get_marker() for one in marks}) == 5
    assert len({to_hex(one.get_color()) for one in marks[:4]}) == 4


def test_the_legend_names_what_is_there_and_nothing_else(figure):
    (legend,) = figure.legends
    assert texts(legend.get_texts()) == [
        *("norm", "median", "limit", "over 6 sigma, SpikeScore 1.5%"),
        *("clipped", "skipped", "NaN or inf", "zero", "recommended limit"),
    ]
    bare = plot.draw(History({"norm": torch.ones(50, dtype=torch.float64)}))
    assert texts(bare.legends[0].get_texts()) == ["norm", "median"]


def test_warmup_is_shaded():
    history = run()
    history.norms[:40] *= 30
    suggestion = suggest_max_norm(history)
    assert suggestion.warmup
    assert "warm-up" in texts(plot.draw(history, suggestion).legends[0].get_texts())


def begins_of(over_steps):
    """The steps at which runs begin."""
    return [one.get_xdata()[0] for one in over_steps.lines if one.get_color() == plot.GREY]


def test_a_line_with_its_name_stands_where_each_run_begins():
    joined = in_runs(run(), 190, 200)
    suggestion = suggest_max_norm(joined)
    figure: Any = plot.draw(joined, suggestion)
    over_steps, bars = figure.axes
    assert begins_of(over_steps) == [1001, 1191, 1201]
    assert texts(over_steps.texts) == ["run 1", "run 2", "run 3"]
    # Names of runs that begin next to each other stand one above the other.
    assert [text.xyann[1] for text in over_steps.texts] == [3, 3, 13]
    assert suggestion.run == 3
    assert sum(patch.get_width() for patch in bars.patches) == suggestion.steps


def test_names_of_many_runs_stand_where_they_have_room():
    figure: Any = plot.draw(in_runs(run(), *range(2, 400, 2)))
    places = [(text.xy[0], text.xyann[1]) for text in figure.axes[0].texts]
    assert {height for _, height in places} == {3, 13, 23}
    for height in (3, 13, 23):
        steps = sorted(step for step, at in places if at == height)
        assert min(after - step for step, after in itertools.pairwise(steps)) > 0.07 * 398


def test_runs_with_the_same_steps_stand_side_by_side():
    history = run()
    twice = in_runs(changed(history, step=torch.cat([history.steps[:200]] * 2)), 200)
    figure: Any = plot.draw(twice)
    over_steps = figure.axes[0]
    assert begins_of(over_steps) == [1001, 1201]
    assert over_steps.get_xlabel() == "step, counted on from run to run"


def test_a_figure_of_one_run_names_none(figure):
    assert not figure.axes[0].texts


def test_the_histogram_counts_steps_and_shows_candidates(figure):
    history = run()
    suggestion = suggest_max_norm(history, warmup=0)
    bars = figure.axes[1]
    assert sum(patch.get_width() for patch in bars.patches) == suggestion.steps
    labels = texts(bars.texts)
    assert len(labels) == len(suggestion.candidates)
    assert f"{suggestion.max_norm:g} clips" in next(one for one in labels if "recommended" in one)
    heights = sorted(one.get_ydata()[0] for one in bars.lines)
    assert heights == [candidate.max_norm for candidate in suggestion.candidates]


def test_labels_of_candidates_do_not_overlap(figure):
    heights = sorted(text.get_position()[1] for text in figure.axes[1].texts)
    gaps = [high - low for low, high in itertools.pairwise(heights)]
    # The label's own height: 8 points, in an axis of about 190 points.
    assert min(gaps) > 8 / 190
    assert heights[0] >= 0
    assert heights[-1] <= 1


@pytest.mark.parametrize("heights", [[], [0.5], [0.0] * 5, [1.0] * 5, [0.4, 0.41, 0.9, 0.95]])
def test_labels_keep_their_distance_and_stay_on_the_axis(heights):
    labels = plot.label_heights(heights)
    assert len(labels) == len(heights)
    assert all(-1e-9 <= label <= 1 + 1e-9 for label in labels)
    assert all(b - a >= plot.GAP - 1e-9 for a, b in itertools.pairwise(labels))


def named_run(n: int = 12) -> History:
    """A run with norms by name, each larger than the one before, and one that is 0."""
    history = run()
    names = [*(f"layer{i}.weight" for i in range(n)), "a." + 60 * "b"]
    norms = {f"norm/{name}": history.norms * 2.0**i for i, name in enumerate(names)}
    return changed(history, **norms, **{"norm/unused": torch.zeros_like(history.norms)})


def test_the_ten_largest_norms_stand_below_by_name():
    axes: Any = plot.draw(named_run()).axes[0]
    assert texts(axes.get_yticklabels()) == [
        "..." + 45 * "b",
        *(f"layer{i}.weight" for i in range(11, 2, -1)),
    ]
    medians = next(one for one in axes.lines if one.get_label() == "median").get_xdata()
    assert list(medians) == [one.median for one in named_run().largest()]
    assert texts(axes.get_legend().get_texts()) == ["5% to 95% of the steps", "median", "largest"]
    assert axes.get_xscale() == "log"
    assert axes.get_title(loc="left") == "0 in the last step: unused"


def test_norms_by_name_are_those_of_the_run_that_is_suggested_for():
    norms = run().norms
    named = {"norm/a": torch.cat([norms[:300], torch.zeros(100)]), "norm/b": norms}
    joined = in_runs(changed(run(), **named), 300)
    suggestion = suggest_max_norm(joined)
    assert suggestion.run == 2
    axes = plot.draw(joined, suggestion).axes[0]
    assert texts(axes.get_yticklabels()) == ["b"]
    assert axes.get_title(loc="left") == "0 in the last step: a"


# A character of a script that the font lacks is drawn as a box, with a warning.
@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")
@hypothesis.settings(max_examples=6)
@hypothesis.given(
    names=st.lists(
        st.text(st.characters() | st.sampled_from("$$$\\{}_^\n\x1b\ud800"), max_size=60),
        min_size=8,
        max_size=8,
        unique=True,
    )
)
def test_any_names_are_drawn(tmp_path_factory, names):
    norms = run().norms
    zeros = torch.zeros_like(norms)
    named = {f"norm/{name}": norms if i < 4 else zeros for i, name in enumerate(names)}
    path = tmp_path_factory.mktemp("figures") / "run.svg"
    plot.save(path, changed(run(), **named))
    text = "".join(ET.parse(path).getroot().itertext())
    for name in names[:4]:
        assert printable(name)[-20:].strip() in text


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_norms_by_name_without_one_to_draw_leave_the_figure_as_it_is(value):
    history = run()
    unknown = changed(history, **{"norm/a": torch.full_like(history.norms, value)})
    assert len(plot.draw(unknown).axes) == len(plot.draw(history).axes) == 2


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_save_writes_the_figure(tmp_path, ending):
    path, again = tmp_path / f"run.{ending}", tmp_path / f"again.{ending}"
    history = run()
    suggestion = suggest_max_norm(history)
    plot.save(path, history, suggestion)
    plot.save(again, history, suggestion)
    data = path.read_bytes()
    assert data == again.read_bytes()
    if ending == "png":
        assert data.startswith(b"\x89PNG")
    else:
        assert b"#d55e00" in data, "the style's colour of the recommended limit"
        text = "".join(ET.fromstring(data).itertext())
        assert "gradient norm before clipping" in text
        assert "recommended" in text


@pytest.mark.parametrize("n", [1, 2, 15, 25_000])
def test_short_and_long_runs_are_drawn(tmp_path, n):
    norms = torch.linspace(1.0, 2.0, n, dtype=torch.float64)
    history = History({"norm": norms, "limit": torch.full_like(norms, 1.5)})
    path = tmp_path / "run.svg"
    plot.save(path, history)
    # Many steps are an image inside, which opens at once.
    assert path.stat().st_size < 500_000


@pytest.mark.parametrize("norm", [0.0, math.nan, math.inf])
def test_a_run_without_norms_to_draw_is_refused(tmp_path, norm):
    norms = torch.full((9,), norm, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"expected a finite norm over 0 to draw.*'error'"):
        plot.save(tmp_path / "a.png", History({"norm": norms}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run.pdf", "run", "run.csv"])
def test_save_refuses_other_endings(tmp_path, name):
    with pytest.raises(ValueError, match=r"ends in \.png or \.svg.*write \S*run\.png"):
        plot.save(tmp_path / name, run())


def test_save_refuses_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="make it first"):
        plot.save(tmp_path / "figures" / "run.png", run())

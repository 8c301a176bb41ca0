"""The figure of a run: what is in it, and that it is drawn where there is little to draw."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch

from tritonclip.advice.suggestion import percent, suggest_max_norm
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


def test_marks_differ_in_colour_and_shape(figure):
    marks = [one for one in figure.axes[0].lines if one.get_marker() != "None"]
    assert len(marks) == 3
    assert len({one.get_marker() for one in marks}) == 3
    assert len({to_hex(one.get_color()) for one in marks}) == 3


def test_the_legend_names_what_is_there_and_nothing_else(figure):
    suggestion = suggest_max_norm(run(), warmup=0)
    (share,) = [c.share for c in suggestion.candidates if c.origin == "recommended"]
    (legend,) = figure.legends
    assert sorted(texts(legend.get_texts())) == sorted(
        [
            *("norm", "median", "limit", "clipped", "skipped", "NaN or inf", "other candidates"),
            f"{suggestion.max_norm:g}, recommended: clips {percent(share)}",
        ]
    )
    bare = plot.draw(History({"norm": torch.ones(50, dtype=torch.float64)}))
    assert texts(bare.legends[0].get_texts()) == ["norm", "median"]


def test_warmup_is_shaded():
    history = run()
    history.norms[:40] *= 30
    suggestion = suggest_max_norm(history)
    assert suggestion.warmup
    assert "warm-up" in texts(plot.draw(history, suggestion).legends[0].get_texts())


def test_each_candidate_is_a_line(figure):
    suggestion = suggest_max_norm(run(), warmup=0)
    lines = [one for one in figure.axes[0].lines if list(one.get_xdata()) == [0, 1]]
    assert [one.get_ydata()[0] for one in lines] == [c.max_norm for c in suggestion.candidates]
    (chosen,) = [one for one in lines if one.get_ydata()[0] == suggestion.max_norm]
    assert to_hex(chosen.get_color()) not in {
        to_hex(one.get_color()) for one in lines if one is not chosen
    }


def test_limits_far_from_every_norm_leave_the_axis_to_the_norms():
    norms = torch.linspace(1.0, 2.0, 50, dtype=torch.float64)
    far = History({"norm": norms, "limit": torch.full_like(norms, 1e6)})
    assert plot.draw(far).axes[0].get_ylim()[1] < 10


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

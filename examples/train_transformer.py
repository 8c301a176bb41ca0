"""Train a small transformer whose gradients spike, and clip or skip them in six ways.

It learns to write the help pages of Python (`help("topics")`), character by character. Batches are
so small, and the learning rate is so high, that one spike can undo the training before it. The six
ways are: no clipping; a fixed limit; the limit that `suggest_max_norm` suggests for the run with
the fixed limit; a percentile of the last norms; their z-score; and no clipping, with outliers
skipped. All start from the same weights and use the same batches. If the norms suggest no limit,
the candidate that clips about 5% of the steps takes its place.

The text differs between versions of Python, so that the results vary. At ``--learning-rate 1.0``
the limits that follow the norms fail too; docs/choosing_max_norm.md says why.

Run it with ``make demo``, or after ``pip install ".[examples]"`` with
``python examples/train_transformer.py``. Beside the figure it writes the norms of a run with the
fixed limit, for ``python -m tritonclip suggest`` and ``plot``.
"""

import argparse
import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import rich
import torch
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Column, Table

import tritonclip

LENGTH, WIDTH, HEADS, BATCH, WARMUP = 64, 48, 4, 2, 100


@dataclass(frozen=True)
class Way:
    """A way to clip or skip spikes; `clip` None stands for the suggested limit."""

    name: str
    colour: str
    clip: float | tritonclip.ClipByQuantile | tritonclip.ClipByZScore | None = None
    skip_above: tritonclip.Outlier | None = None


# Colours are those of the figure's style.
WAYS = (
    Way("no clipping", "C1", math.inf),
    Way("fixed limit 1.0", "C0", 1.0),
    Way("suggested limit", "C2"),
    Way("percentile", "C3", tritonclip.ClipByQuantile(0.9, window=100)),
    Way("z-score", "C4", tritonclip.ClipByZScore()),
    Way("skipped outliers", "C5", math.inf, tritonclip.Outlier(sigmas=6.0, window=128)),
)


@dataclass(frozen=True)
class Settings:
    """Settings of all runs."""

    steps: int = 800
    seeds: int = 3
    learning_rate: float = 0.5


QUICK = Settings(steps=300, seeds=1, learning_rate=0.8)


@dataclass(frozen=True)
class History:
    """Measurements of one training run, by step; norms are those before clipping."""

    losses: list[float]
    norms: list[float]
    limits: list[float]
    clipped: list[bool]
    skipped: list[bool]

    @property
    def final_loss(self) -> float:
        """The mean of the last 50 losses; infinite if it is NaN or not below the first loss."""
        loss = fmean(self.losses[-50:])
        return loss if loss < self.losses[0] else math.inf

    def spikes(self) -> list[bool]:
        """Whether the run survived each spike before its last 60 steps.

        A spike is a norm of at least four times the median of the 50 norms before it. Spikes less
        than 25 steps from each other count as one. The run survives a spike if the mean loss of 50
        steps, from 10 steps after it on, is at most 1.1 times that of the 50 steps before it.
        """
        survived, last = [], -math.inf
        for step in range(50, len(self.norms) - 60):
            if self.norms[step] < 4 * median(self.norms[step - 50 : step]):
                continue
            if step - last >= 25:
                before, after = self.losses[step - 50 : step], self.losses[step + 10 : step + 60]
                survived.append(fmean(after) <= 1.1 * fmean(before))
            last = step
        return survived


class Transformer(torch.nn.Module):
    """Two layers on embeddings of characters and positions, with scores of the next character."""

    def __init__(self, n_characters: int) -> None:
        super().__init__()
        self.characters = torch.nn.Embedding(n_characters, WIDTH)
        self.positions = torch.nn.Embedding(LENGTH, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        norm = torch.nn.LayerNorm(WIDTH)
        self.layers = torch.nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.scores = torch.nn.Linear(WIDTH, n_characters)
        self.mask = torch.nn.Buffer(torch.nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text: torch.Tensor):
        """Return the scores of each next character."""
        x = self.characters(text) + self.positions.weight
        return self.scores(self.layers(x, self.mask, is_causal=True))


def load_text(device: torch.device) -> torch.Tensor:
    """Return the help pages as numbers of characters, from 0 up."""
    text = "\n".join(topics[name] for name in sorted(topics))
    number_of = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([number_of[character] for character in text], device=device)


def train(
    way: Way, seed: int, text: torch.Tensor, settings: Settings, advance: Callable[[], None]
) -> History:
    """Train one transformer and record its norms."""
    torch.manual_seed(seed)
    model = Transformer(int(text.max()) + 1).to(text.device)
    # A fused optimizer skips a step on the device, so that the host does not wait.
    optimizer = tritonclip.ClippedOptimizer(
        torch.optim.SGD(model.parameters(), settings.learning_rate, momentum=0.9, fused=True),
        math.inf if way.clip is None else way.clip,
        skip_above=way.skip_above,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARMUP) * (1 - step / settings.steps)
    )
    windows = text.unfold(0, LENGTH + 1, 1)
    batches = torch.randint(len(windows), (settings.steps, BATCH)).to(text.device)
    losses = []

    with TemporaryDirectory() as folder:
        recording = Path(folder) / "norms.csv"
        with tritonclip.record(recording) as optimizer.recorder:
            for batch in batches:
                scores = model(windows[batch, :-1])
                loss = torch.nn.functional.cross_entropy(scores.mT, windows[batch, 1:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.detach())
                advance()
        with recording.open(newline="") as file:
            rows = list(csv.DictReader(file))

    # A step that was skipped has no coefficient.
    norms, coefficients, limits, skipped = (
        [float(row[name] or "nan") for row in rows]
        for name in ("norm", "coefficient", "limit", "skipped")
    )
    clipped = [coefficient < 1 for coefficient in coefficients]
    # One transfer at the end, so that no step waits for a GPU.
    return History(torch.stack(losses).tolist(), norms, limits, clipped, list(map(bool, skipped)))


def train_all(settings: Settings) -> dict[str, list[History]]:
    """Train in each way, once from each seed, under progress bars."""
    # Threads only slow down matrices as small as these.
    torch.set_num_threads(1)
    text = load_text(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    time = TimeRemainingColumn(elapsed_when_finished=True)
    histories: dict[str, list[History]] = {}
    columns = ("{task.description:16}", BarColumn(), "{task.percentage:3.0f}%", time)
    with Progress(*columns) as progress:
        for way in WAYS:
            task = progress.add_task(way.name, total=settings.steps * settings.seeds)
            if way.clip is None:
                # Recorded norms are those before clipping, so the run with the fixed limit serves.
                suggestion = tritonclip.suggest_max_norm(histories["fixed limit 1.0"][0].norms)
                progress.print(f"Suggested: {suggestion.max_norm}. {suggestion.reason}")
                # If no limit is suggested, take the candidate that clips about 5% of the steps.
                near = min(suggestion.candidates, key=lambda one: abs(one.share - 0.05))
                way = replace(way, clip=suggestion.max_norm or near.max_norm)
            advance = partial(progress.advance, task)
            seeds = range(settings.seeds)
            histories[way.name] = [train(way, seed, text, settings, advance) for seed in seeds]
    return histories


def make_table(histories: dict[str, list[History]]) -> Table:
    """Tabulate how the runs ended."""
    headings = ("Spikes survived", "Clipped", "Skipped")
    losses_column = Column("Final loss, by seed", justify="right", no_wrap=True)
    columns = (Column(heading, justify="right") for heading in headings)
    table = Table(Column(no_wrap=True), losses_column, *columns)
    for name, runs in histories.items():
        losses = (f"{run.final_loss:.2f}".replace("inf", "diverged") for run in runs)
        spikes = [survived for run in runs for survived in run.spikes()]
        clipped = fmean(clip for run in runs for clip in run.clipped[WARMUP:])
        skipped = sum(sum(run.skipped) for run in runs)
        survived = f"{sum(spikes)} of {len(spikes)}"
        table.add_row(name, " ".join(losses), survived, f"{clipped:.1%}", str(skipped))
    return table


def conclusion(histories: dict[str, list[History]]) -> str:
    """Say in a sentence what the runs have shown."""

    def diverged(*names: str) -> str:
        runs = [run for name in names for run in histories[name]]
        return f"{sum(math.isinf(run.final_loss) for run in runs)} of {len(runs)} runs"

    first, *limited, last = histories
    return (
        f"The transformer diverges in {diverged(first)} without clipping, in {diverged(last)} with "
        f"outliers skipped, and in {diverged(*limited)} with a limit."
    )


def write_norms(run: History, path: Path) -> None:
    """Write norms and limits as a recorder does, over the file of an earlier run."""
    path.unlink(missing_ok=True)
    with tritonclip.record(path) as recorder:
        for norm, limit in zip(run.norms, run.limits, strict=True):
            recorder.add_(norm, limit=limit)


@style.context("tritonclip.advice.figures")
def draw(histories: dict[str, list[History]], path: Path) -> None:
    """Draw the losses of all seeds, and the norms of the seed that is worst without clipping."""
    losses = [run.final_loss for run in histories["no clipping"]]
    worst = losses.index(max(losses))
    names = [way.name for way in WAYS]
    rows: list[Any] = [["loss"] * 3, names[:3], names[3:]]
    figure = Figure(figsize=(8, 7))
    axes = figure.subplot_mosaic(rows, height_ratios=[1.6, 1, 1])
    for way in WAYS:
        draw_losses(axes["loss"], way, histories[way.name])
        draw_norms(axes[way.name], way, histories[way.name][worst])
    axes["loss"].set(
        title=f"Median and range over seeds (number of seeds: {len(losses)})",
        xlabel="step (each point: the mean of the last 25)",
        ylabel="training loss",
        xlim=axes[names[0]].get_xlim(),
        ylim=(2.2, 4.7),
    )
    axes["loss"].legend(loc="upper right", ncols=2)
    for name in (names[0], names[3]):
        axes[name].set_ylabel(f"gradient norm\nbefore clipping, seed {worst}")
    for name in names[3:]:
        axes[name].set_xlabel("step")
    marks = {line.get_label(): line for name in names for line in axes[name].lines}
    legend = figure.legend(handles=marks.values(), loc="outside lower center", ncols=len(marks))
    for mark in legend.get_lines():
        # The panels differ in colour, so the legend shows the shapes of the marks only.
        mark.set_color("0.3" if mark.get_linestyle() == "None" else mark.get_color())
    figure.savefig(path)


def draw_losses(axes: Axes, way: Way, runs: Sequence[History]) -> None:
    """Draw the median over the runs, and their range; a loss that is NaN is the largest."""
    high = 2 * max(run.losses[0] for run in runs)
    losses = [[loss if loss < high else high for loss in smooth(run.losses)] for run in runs]
    diverged = sum(math.isinf(run.final_loss) for run in runs)
    label = f"{way.name} ({diverged} of {len(runs)} diverged)" if diverged else way.name
    columns = [*zip(*losses, strict=True)]
    axes.plot([*map(median, columns)], color=way.colour, label=label)
    lows, highs = [*map(min, columns)], [*map(max, columns)]
    axes.fill_between(range(len(columns)), lows, highs, color=way.colour, alpha=0.2, linewidth=0)


def draw_norms(axes: Axes, way: Way, run: History) -> None:
    """Draw norms, limits, and a mark on each step that was clipped or skipped."""
    axes.plot(run.norms, color="0.7", linewidth=0.8, label="norm")
    axes.plot(run.limits, color="black", linewidth=1, marker=".", markersize=1.5, label="limit")
    for label, changed, marker in (("clipped", run.clipped, "."), ("skipped", run.skipped, "x")):
        norms = {step: run.norms[step] for step in range(len(changed)) if changed[step]}
        if norms:
            steps, heights = list(norms), list(norms.values())
            axes.plot(steps, heights, marker, color=way.colour, markersize=6, label=label)
    axes.set(title=way.name, yscale="log", xlim=(0, len(run.norms)), ylim=(0.2, 30))


def smooth(values: Sequence[float], window: int = 25) -> list[float]:
    """Average each value with those before it."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def parse(arguments: Sequence[str] | None) -> tuple[Settings, Path]:
    """Parse the command line, and report mistakes before any training."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, fewer steps, in seconds")
    parser.add_argument("--learning-rate", type=float, help=f"default: {Settings.learning_rate}")
    figure = "build/train_transformer.png"
    parser.add_argument("--output", type=Path, default=figure, help="the figure")
    options = parser.parse_args(arguments)

    settings = QUICK if options.quick else Settings()
    if options.learning_rate is not None:
        settings = replace(settings, learning_rate=options.learning_rate)
    if not 0 < settings.learning_rate <= 10:
        parser.error(f"--learning-rate must be in (0, 10], got {settings.learning_rate:g}")
    if options.output.suffix != ".png" or options.output.is_dir():
        parser.error(f"--output must be a file that ends in .png, got {options.output}")
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: cannot make the folder: {error}")
    return settings, options.output


def main(arguments: Sequence[str] | None = None) -> dict[str, list[History]]:
    """Train, report and draw."""
    settings, path = parse(arguments)
    histories = train_all(settings)
    rich.print(make_table(histories))
    draw(histories, path)
    norms = path.with_suffix(".csv")
    write_norms(histories["fixed limit 1.0"][0], norms)
    print(f"Figure: {path}\nNorms under the fixed limit: {norms}")
    return histories


if __name__ == "__main__":
    main()

"""Train a recurrent network whose gradients explode: without clipping, and with each rule.

Gradient clipping was invented for this case. A plain tanh RNN reads handwritten digits pixel by
pixel, 64 steps an image, so a gradient passes through the recurrent matrix 64 times on its way
back. That matrix starts as an orthogonal one times 2, and the first gradients have norms above
10,000. Without clipping, the first steps change the weights so much that the network hardly learns;
with each rule of tritonclip it reads the digits. All runs have the same initial weights, batches
and settings; only the rule differs. A smaller learning rate does not help: without clipping, the
best of nine learning rates from 1e-6 to 2e-2 (it was 3e-4) reads 43% of the test digits.

The limit of 1.0 clips nearly every step; `suggest_max_norm` would choose one that clips 1 to 10%.
Here the limit acts as a smaller learning rate: at 20, which clips less than 1% of the steps, this
network learns poorly. train_transformer.py shows the usual case.

The first steps amplify every rounding error, so results differ between kinds of CPUs.

Run it with ``make demo``, or after ``pip install ".[examples]"`` with
``python examples/train_rnn.py``.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import rich
import torch
from matplotlib import style
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Column, Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tritonclip

Rule = tritonclip.ClipByGlobalNorm | tritonclip.ClipByNorm | tritonclip.ClipByValue

# Colours are those of the figure's style.
RUNS: tuple[tuple[str, Rule | None, str], ...] = (
    ("no clipping", None, "C1"),
    ("ClipByGlobalNorm(1.0)", tritonclip.ClipByGlobalNorm(1.0), "C0"),
    ("ClipByNorm(0.5)", tritonclip.ClipByNorm(0.5), "C2"),
    ("ClipByValue(0.01)", tritonclip.ClipByValue(0.01), "C3"),
)


@dataclass(frozen=True)
class Settings:
    """Settings of all runs."""

    steps: int = 2000
    recurrent_gain: float = 2.0
    learning_rate: float = 0.02


QUICK = Settings(steps=120, recurrent_gain=1.2, learning_rate=0.07)


@dataclass(frozen=True)
class History:
    """Measurements of one training run; losses and norms are those of its finite steps."""

    losses: list[float]
    norms: list[float]
    diverged_at: int | None
    clipped_share: float
    accuracy: float


class PixelReader(torch.nn.Module):
    """A tanh RNN over the pixels, and a linear layer over its last state."""

    def __init__(self, recurrent_gain: float) -> None:
        super().__init__()
        self.rnn = torch.nn.RNN(1, 100, nonlinearity="tanh", batch_first=True)
        torch.nn.init.orthogonal_(self.rnn.get_parameter("weight_hh_l0"), gain=recurrent_gain)
        self.classes = torch.nn.Linear(100, 10)

    def forward(self, pixels: torch.Tensor):
        """Return the ten class scores of each sequence."""
        _, last_state = self.rnn(pixels)
        return self.classes(last_state[0])


def load_sequences(device: torch.device) -> list[torch.Tensor]:
    """Return train images, test images, train labels, test labels; an image is 64 pixels."""
    digits = load_digits()
    images = torch.tensor(digits.data / 8 - 1, dtype=torch.float32).unsqueeze(-1)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    splits = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    return [split.to(device) for split in splits]


def train(
    rule: Rule | None,
    data: list[torch.Tensor],
    settings: Settings,
    advance: Callable[[], None],
    seed: int = 0,
) -> History:
    """Train one network and test it."""
    train_images, test_images, train_labels, test_labels = data
    torch.manual_seed(seed)
    model = PixelReader(settings.recurrent_gain).to(train_images.device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.learning_rate, momentum=0.9
    )
    if rule is not None:
        optimizer = tritonclip.ClippedOptimizer(optimizer, rule)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, settings.steps)
    batches = torch.randint(len(train_images), (settings.steps, 64)).to(train_images.device)
    measured = []

    for batch in batches:
        loss = torch.nn.functional.cross_entropy(model(train_images[batch]), train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        before = gradient_norm(model)
        optimizer.step()
        after = gradient_norm(model)
        schedule.step()
        measured.append(torch.stack([loss.detach(), before, after]))
        advance()

    # One transfer at the end, so that no step waits for a GPU.
    rows = torch.stack(measured).cpu()
    finite = int(rows.isfinite().all(dim=1).cumprod(dim=0).sum())
    losses, norms, _ = rows[:finite].T.tolist()
    diverged_at = finite + 1 if finite < settings.steps else None
    clipped_share = (rows[:, 2] < rows[:, 1]).float().mean().item()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    return History(losses, norms, diverged_at, clipped_share, accuracy)


def gradient_norm(model: torch.nn.Module) -> torch.Tensor:
    """Measure the global norm for the table and the figure, in the same way in every run."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return tritonclip.get_total_norm(gradients)


def train_all(settings: Settings) -> list[History]:
    """Train once without clipping and once with each rule, under progress bars."""
    # Threads only slow down matrices as small as these.
    torch.set_num_threads(1)
    data = load_sequences(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    time = TimeRemainingColumn(elapsed_when_finished=True)
    histories = []
    with Progress(
        "{task.description:21}", BarColumn(), "{task.percentage:3.0f}%", time
    ) as progress:
        for name, rule, _ in RUNS:
            task = progress.add_task(name, total=settings.steps)
            histories.append(train(rule, data, settings, partial(progress.advance, task)))
    return histories


def make_table(histories: Sequence[History]) -> Table:
    """Tabulate how the runs ended."""
    headings = ("Test accuracy", "Final loss", "Largest norm", "Clipped")
    table = Table(Column(no_wrap=True), *(Column(heading, justify="right") for heading in headings))
    for (name, *_), run in zip(RUNS, histories, strict=True):
        loss = f"diverged at step {run.diverged_at}"
        if run.diverged_at is None:
            loss = f"{fmean(run.losses[-50:]):.3f}"
        largest = f"{max(run.norms, default=math.nan):,.1f}"
        table.add_row(name, f"{run.accuracy:.1%}", loss, largest, f"{run.clipped_share:.0%}")
    return table


def conclusion(histories: Sequence[History]) -> str:
    """Say in a sentence what the runs have shown."""
    unclipped, *clipped = (f"{run.accuracy:.0%}" for run in histories)
    names = (name for name, *_ in RUNS[1:])
    with_rules = ", ".join(
        f"{share} with {name}" for share, name in zip(clipped, names, strict=True)
    )
    return f"The RNN reads {unclipped} of the test digits without clipping, {with_rules}."


@style.context("tritonclip.advice.figures")
def draw(histories: Sequence[History], path: Path) -> None:
    """Draw loss and gradient norm over the steps, up to where a run diverges."""
    figure = Figure(figsize=(8, 3.8))
    loss_axes, norm_axes = figure.subplots(1, 2)
    for (name, _, colour), run in zip(RUNS, histories, strict=True):
        label = f"{name}: {run.accuracy:.0%} of test digits right"
        loss_axes.plot(smooth(run.losses), color=colour, label=label)
        norm_axes.plot(smooth(run.norms), color=colour)
    loss_axes.axhline(math.log(10), color="black", linestyle=":", label="guessing")
    loss_axes.set(ylabel="training loss", ylim=(0, None))
    norm_axes.set(ylabel="gradient norm before clipping", yscale="log")
    for axes in (loss_axes, norm_axes):
        axes.set_xlabel("step (each point: the mean of the last 25)")
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(path)


def smooth(values: Sequence[float], window: int = 25) -> list[float]:
    """Average each value with those before it."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def parse(arguments: Sequence[str] | None) -> tuple[Settings, Path]:
    """Parse the command line, and report mistakes before any training."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="an easier network, in seconds")
    parser.add_argument("--steps", type=int, help=f"default: {Settings.steps}")
    parser.add_argument("--output", type=Path, default="build/train_rnn.png", help="the figure")
    options = parser.parse_args(arguments)

    settings = QUICK if options.quick else Settings()
    if options.steps is not None:
        settings = replace(settings, steps=options.steps)
    if settings.steps < 1:
        parser.error(f"--steps must be at least 1, got {settings.steps}")
    if options.output.suffix != ".png" or options.output.is_dir():
        parser.error(f"--output must be a file that ends in .png, got {options.output}")
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: cannot make the folder: {error}")
    return settings, options.output


def main(arguments: Sequence[str] | None = None) -> list[History]:
    """Train, report and draw."""
    settings, path = parse(arguments)
    histories = train_all(settings)
    rich.print(make_table(histories))
    draw(histories, path)
    print(f"Figure: {path}")
    return histories


if __name__ == "__main__":
    main()

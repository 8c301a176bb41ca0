"""Train a recurrent network whose gradients explode: without clipping, and with each rule.

Gradient clipping was invented for this case. A plain tanh RNN reads handwritten digits pixel by
pixel, 64 steps an image, so a gradient passes through the recurrent matrix 64 times on its way
back. That matrix starts as an orthogonal one times 2, and the first gradients have norms above
10,000. Without clipping, the first steps throw the weights so far off that the network hardly
learns; with each rule of tritonclip it reads the digits. All runs share the start, the batches
and every setting but the rule.

Run it with ``python examples/train_rnn.py``; it needs ``pip install "tritonclip[examples]"``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy

import tritonclip

Rule = tritonclip.ClipByGlobalNorm | tritonclip.ClipByNorm | tritonclip.ClipByValue

# The colours are Okabe and Ito's, which colour-blind readers can tell apart.
RUNS: tuple[tuple[str, Rule | None, str], ...] = (
    ("no clipping", None, "#D55E00"),
    ("ClipByGlobalNorm(1.0)", tritonclip.ClipByGlobalNorm(1.0), "#0072B2"),
    ("ClipByNorm(0.5)", tritonclip.ClipByNorm(0.5), "#009E73"),
    ("ClipByValue(0.01)", tritonclip.ClipByValue(0.01), "#CC79A7"),
)


@dataclass(frozen=True)
class Settings:
    """What all runs share."""

    steps: int = 2000
    hidden_size: int = 100
    recurrent_gain: float = 2.0
    learning_rate: float = 0.02


QUICK = Settings(steps=200, hidden_size=64, recurrent_gain=1.2, learning_rate=0.07)


@dataclass(frozen=True)
class History:
    """What one training run measured: one entry a step, norms before clipping."""

    losses: list[float]
    norms: list[float]
    clipped: list[bool]
    accuracy: float

    @property
    def finite_steps(self) -> int:
        """The number of steps before the first loss or norm that is not finite."""
        pairs = enumerate(zip(self.losses, self.norms, strict=True))
        bad = (step for step, pair in pairs if not all(map(math.isfinite, pair)))
        return next(bad, len(self.losses))


class PixelReader(torch.nn.Module):
    """A tanh RNN over the pixels, and a linear layer over its last state."""

    def __init__(self, hidden_size: int, recurrent_gain: float) -> None:
        super().__init__()
        self.rnn = torch.nn.RNN(1, hidden_size, nonlinearity="tanh", batch_first=True)
        self.classes = torch.nn.Linear(hidden_size, 10)
        torch.nn.init.orthogonal_(self.rnn.weight_hh_l0, gain=recurrent_gain)
        torch.nn.init.zeros_(self.rnn.bias_ih_l0)
        torch.nn.init.zeros_(self.rnn.bias_hh_l0)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the ten class scores of each sequence."""
        _, last_state = self.rnn(pixels)
        scores: torch.Tensor = self.classes(last_state[0])
        return scores


def load_sequences(device: torch.device) -> list[torch.Tensor]:
    """Return train images, test images, train labels, test labels; an image is 64 pixels."""
    digits = load_digits()
    images = torch.tensor(digits.data / 8 - 1, dtype=torch.float32).unsqueeze(-1)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    return [part.to(device) for part in parts]


def train(
    rule: Rule | None, data: list[torch.Tensor], settings: Settings, advance: Callable[[], None]
) -> History:
    """Train one network and test it."""
    train_images, test_images, train_labels, test_labels = data
    torch.manual_seed(0)
    model = PixelReader(settings.hidden_size, settings.recurrent_gain).to(train_images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, settings.steps)
    batches = torch.randint(len(train_images), (settings.steps, 64)).to(train_images.device)
    measured = []

    for batch in batches:
        loss = cross_entropy(model(train_images[batch]), train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        before = gradient_norm(model)
        if rule is not None:
            tritonclip.clip_(model.parameters(), rule)
        after = gradient_norm(model)
        optimizer.step()
        schedule.step()
        measured.append(torch.stack([loss.detach(), before, after]))
        advance()

    # Read once, at the end, so that a GPU need not wait for the host at every step.
    losses, norms, norms_after = torch.stack(measured).T.tolist()
    clipped = [b > a for b, a in zip(norms, norms_after, strict=True)]
    with torch.no_grad():
        right = model(test_images).argmax(1) == test_labels
    return History(losses, norms, clipped, right.float().mean().item())


def gradient_norm(model: torch.nn.Module) -> torch.Tensor:
    """Measure the global norm, for the table and the figure only."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return tritonclip.get_total_norm(gradients)


def train_all(settings: Settings, console: Console) -> list[History]:
    """Train once without clipping and once for each rule, under progress bars."""
    # Threads only slow down matrices as small as these.
    torch.set_num_threads(1)
    data = load_sequences(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    columns = TextColumn("{task.description:21}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        tasks = [progress.add_task(name, total=settings.steps, start=False) for name, *_ in RUNS]
        histories = []
        for task, (_, rule, _) in zip(tasks, RUNS, strict=True):
            progress.start_task(task)
            histories.append(train(rule, data, settings, partial(progress.advance, task)))
    return histories


def make_table(histories: Sequence[History]) -> Table:
    """Tabulate how the runs ended."""
    table = Table()
    for heading in ("Run", "Test accuracy", "Final loss", "Largest norm", "Clipped steps"):
        table.add_column(heading, justify="left" if heading == "Run" else "right")
    for (name, *_), history in zip(RUNS, histories, strict=True):
        steps, finite = len(history.losses), history.finite_steps
        last = history.losses[-50:]
        loss = (
            f"{sum(last) / len(last):.3f}" if finite == steps else f"diverged at step {finite + 1}"
        )
        largest = max(history.norms[:finite], default=math.nan)
        share = sum(history.clipped) / steps
        table.add_row(name, f"{history.accuracy:.1%}", loss, f"{largest:,.1f}", f"{share:.0%}")
    return table


def draw(histories: Sequence[History], path: Path) -> None:
    """Draw loss and gradient norm over the steps, smoothed, up to where a run diverges."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    loss_axes, norm_axes = figure.subplots(1, 2)
    for (name, _, colour), history in zip(RUNS, histories, strict=True):
        finite = history.finite_steps
        label = f"{name}: {history.accuracy:.0%} right"
        loss_axes.plot(smooth(history.losses[:finite]), color=colour, label=label)
        logs = smooth([math.log(max(norm, 1e-30)) for norm in history.norms[:finite]])
        norm_axes.plot([math.exp(value) for value in logs], color=colour)
    loss_axes.axhline(math.log(10), color="0.5", linestyle=":", linewidth=1)
    loss_axes.set(title="Training loss", xlabel="step", ylim=(0, None))
    norm_axes.set(title="Gradient norm before clipping", xlabel="step", yscale="log")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=150)


def smooth(values: Sequence[float], window: int = 25) -> list[float]:
    """Average over the last `window` values."""
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]


def parse(arguments: Sequence[str] | None) -> tuple[Settings, Path]:
    """Read the command line; what is wrong with it is said before any training."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller network, in seconds")
    parser.add_argument("--steps", type=int, help=f"default: {Settings.steps}")
    parser.add_argument("--learning-rate", type=float, help=f"default: {Settings.learning_rate}")
    parser.add_argument("--output", type=Path, default="build/train_rnn.png", help="the figure")
    options = parser.parse_args(arguments)

    settings = QUICK if options.quick else Settings()
    if options.steps is not None:
        settings = replace(settings, steps=options.steps)
    if options.learning_rate is not None:
        settings = replace(settings, learning_rate=options.learning_rate)
    if settings.steps < 1:
        parser.error(f"--steps must be at least 1, got {settings.steps}")
    if not 0 < settings.learning_rate < math.inf:
        parser.error(f"--learning-rate must be positive, got {settings.learning_rate}")
    if options.output.suffix != ".png" or options.output.is_dir():
        parser.error(f"--output must be a file that ends in .png, got {options.output}")
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: cannot make the folder of {options.output}: {error.strerror}")
    return settings, options.output


def main(arguments: Sequence[str] | None = None) -> list[History]:
    """Train, draw and report."""
    settings, path = parse(arguments)
    console = Console()
    histories = train_all(settings, console)
    draw(histories, path)
    console.print(make_table(histories))
    console.print(f"Figure: {path}")
    return histories


if __name__ == "__main__":
    main()

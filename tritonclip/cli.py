"""The command line: `python -m tritonclip`, installed as `tritonclip`.

`doctor`, the default, needs nothing but the package. `suggest` and `plot` need the extra `monitor`,
which they import when they run.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import tritonclip
from tritonclip import settings
from tritonclip.backends import choose, native

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tritonclip.monitor.history import History
    from tritonclip.monitor.suggestion import Suggestion

# The self-test of a device clips in these dtypes by these rules.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_RULES = (
    tritonclip.ClipByGlobalNorm(1.0),
    tritonclip.ClipByNorm(1.0),
    tritonclip.ClipByValue(0.5),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 1 for bad input, 2 for bad usage."""
    try:
        chosen = _parser().parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    if chosen.command in (None, "doctor"):
        return doctor()
    try:
        if chosen.command == "plot":
            plot(chosen.file, chosen.out, chosen.warmup, chosen.run)
        else:
            suggest(chosen.file, chosen.warmup, chosen.run)
    except ModuleNotFoundError as error:
        package = (error.name or "tritonclip").split(".")[0]
        if package == "tritonclip":
            raise
        print(
            f"python -m tritonclip {chosen.command} needs {package}, which is not installed; "
            'expected the extra: pip install "tritonclip[monitor]". Without it there is '
            "python -m tritonclip doctor",
            file=sys.stderr,
        )
        return 1
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tritonclip" if Path(sys.argv[0]).stem == "tritonclip" else "python -m tritonclip",
        description="Gradient clipping: checks of the installation, and help to choose max_norm.",
    )
    parser.add_argument(
        "--version", action="version", version=f"tritonclip {tritonclip.__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, about in (
        ("doctor", "print versions, devices and backends, and run a short self-test"),
        ("suggest", "suggest max_norm from FILE, a recorder's .csv or .jsonl; largest gradients"),
        ("plot", "draw the norms in FILE, with candidates for max_norm and largest gradients"),
    ):
        command = commands.add_parser(
            name, help=about, description=f"{about[0].upper()}{about[1:]}."
        )
        if name == "doctor":
            continue
        command.add_argument("file", type=Path, metavar="FILE")
        command.add_argument(
            "--warmup",
            type=_at_least(0),
            metavar="STEPS",
            help="steps to leave out at the start of each run; found by default",
        )
        command.add_argument(
            "--run",
            type=_at_least(1),
            metavar="NUMBER",
            help="one run, where FILE has several; by default the last with enough steps",
        )
        if name == "plot":
            command.add_argument(
                "--out", type=Path, help="a .png or .svg file; by default FILE as .png"
            )
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
        return int(text)

    return number


def doctor() -> int:
    """Prints versions, devices and their backends, and tests each device.

    Returns:
        1 where a self-test failed or an environment variable is wrong, else 0.
    """
    try:
        backend, verifying = settings.current()
    except ValueError as error:
        print(error)
        return 1
    for name, text in (
        ("tritonclip", tritonclip.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("triton", _version("triton")),
        ("c extension", native.describe()),
        ("backend", backend),
        ("verify", "on" if verifying else "off"),
    ):
        print(f"{name:<12}{text}")
    failed = False
    for device in _devices():
        backend, result = _self_test(device)
        failed |= result != "ok"
        print(f"{device!s:<12}{_device_name(device)}: {backend} backend, self-test {result}")
    if not torch.cuda.device_count():
        print(f"{'gpu':<12}no GPU was found{_why_no_gpu()}; {_backend_of_a_gpu()}")
    return int(failed)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[torch.device]:
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *gpus]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _why_no_gpu() -> str:
    built = torch.version.cuda or torch.version.hip
    return "" if built else f": torch {torch.__version__} is built without CUDA and ROCm"


def _backend_of_a_gpu() -> str:
    """The backend that a GPU would have and, where it is a slow one, why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            backend = choose.backend_name(torch.device("cuda"), torch.float32)
        except RuntimeError as error:
            return f"one would not be served: {error}"
    return ": ".join([f"the {backend} backend would serve one", *(str(w.message) for w in caught)])


def _self_test(device: torch.device) -> tuple[str, str]:
    """The backend of a device, and the result of a verified clip in every dtype by every rule."""
    try:
        backend = choose.backend_name(device, torch.float32)
        with tritonclip.verify():
            for dtype in _DTYPES:
                for rule in _RULES:
                    _clip_sample(device, dtype, rule)
    except Exception as error:
        return "no", f"failed: {type(error).__name__}: {error}"
    return backend, "ok"


def _clip_sample(device: torch.device, dtype: torch.dtype, rule: tritonclip.rules.Rule) -> None:
    """Clips gradients of awkward sizes."""
    random: Callable[..., torch.Tensor] = torch.randn
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for size in (1, 15, 4097, 20001):
        parameter = torch.zeros(size, dtype=dtype, device=device, requires_grad=True)
        parameter.grad = random(size, generator=generator).to(device, dtype)
        parameters.append(parameter)
    tritonclip.clip_(parameters, rule)


def suggest(file: Path, warmup: int | None, run: int | None) -> None:
    """Prints candidates for max_norm, the suggestion and its reason."""
    from rich.console import Console

    from tritonclip.monitor.history import read

    history = read(file)
    suggestion = tritonclip.suggest_max_norm(history, warmup=warmup, run=run)
    # Lines wide enough for the table, where they do not end up in a terminal.
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    if suggestion.candidates:
        console.print(_table(suggestion))
    of_run = f" of run {suggestion.run}" if history.joins else ""
    counted = f"{suggestion.steps} steps{of_run} after a warm-up of {suggestion.warmup}"
    console.print(f"{counted}; left out: {_left_out(suggestion)}.")
    if not math.isnan(suggestion.spike_score):
        console.print(f"SpikeScore: {suggestion.spike_score:.2%}")
    console.print(suggestion.reason)
    limit = "none" if suggestion.max_norm is None else f"{suggestion.max_norm:g}"
    only = ", if the limit has to be fixed" if suggestion.verdict == "drift" else ""
    console.print(f"max_norm: {limit}{only}", style="bold")
    _print_largest(console, history.run(suggestion.run))


def _table(suggestion: Suggestion) -> Table:
    from rich.table import Table

    table = Table()
    for name in ("max_norm", "", "clips"):
        table.add_column(name, justify="left" if not name else "right")
    for spike in suggestion.spikes:
        table.add_column(f"step {spike.step}\nnorm {spike.norm:.4g}", justify="right")
    for candidate in suggestion.candidates:
        table.add_row(
            f"{candidate.max_norm:g}",
            candidate.origin,
            f"{candidate.share:.1%}",
            *(f"x {coefficient:.3g}" for coefficient in candidate.coefficients),
            style="bold" if candidate.origin == "recommended" else None,
        )
    return table


def _print_largest(console: Console, history: History) -> None:
    """Prints the largest norms by name, and the names of dead gradients, if any are known."""
    from rich.markup import escape
    from rich.table import Table

    if largest := history.largest():
        table = Table(title=f"the largest of {len(history.named_norms)} norms by name")
        # Of elements, where they were recorded.
        elements = ("largest element", "zeros") if history.named_zeros else ()
        for name in ("", "median", "largest", "at step", *elements):
            table.add_column(name, justify="right" if name else "left", overflow="fold")
        for one in largest:
            numbers = [f"{one.median:.4g}", f"{one.largest:.4g}", str(one.step)]
            if elements:
                numbers.append("" if one.magnitude is None else f"{one.magnitude:.4g}")
                numbers.append("" if one.zeros is None else f"{one.zeros:.1%}")
            table.add_row(escape(one.name), *numbers)
        console.print(table)
    if most := history.most_zeros():
        shares = ", ".join(f"{name} {share:.1%}" for name, share in most.items())
        console.print(f"most zeros: {shares}", markup=False)
    dead = history.dead()
    for steps in sorted(set(dead.values()), reverse=True):
        names = ", ".join(name for name, own in dead.items() if own == steps)
        since = "last step" if steps == 1 else f"last {steps} steps"
        console.print(f"0 in the {since}: {names}", markup=False)


def _left_out(suggestion: Suggestion) -> str:
    counts = ((suggestion.nonfinite, "NaN or inf"), (suggestion.zeros, "0"))
    return ", ".join(f"{n} that are {kind}" for n, kind in counts if n) or "none"


def plot(file: Path, out: Path | None, warmup: int | None, run: int | None) -> None:
    """Draws the norms, with candidates for max_norm, and prints the path of the figure."""
    from tritonclip.monitor import plot as figure
    from tritonclip.monitor.history import read

    history = read(file)
    if run is not None:
        history = history.run(run)
    out = out or file.with_suffix(".png")
    figure.save(out, history, _suggestion(history, warmup))
    print(out)


def _suggestion(history: History, warmup: int | None) -> Suggestion | None:
    """The suggestion for a run; None where it is too short for one."""
    try:
        return tritonclip.suggest_max_norm(history, warmup=warmup)
    except ValueError as error:
        print(f"The figure has no candidates: {error}", file=sys.stderr)
        return None

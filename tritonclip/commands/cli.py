"""The command line: `python -m tritonclip`, installed as `tritonclip`.

Figures need the extra `monitor`, which is imported where it is used.
"""

from __future__ import annotations

import argparse
import importlib
import math
import operator
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tritonclip
from tritonclip.commands import script
from tritonclip.commands.call_log import CallLog, rank
from tritonclip.commands.doctor import doctor
from tritonclip.integrations.patching import TorchPatch
from tritonclip.messages import is_own

if TYPE_CHECKING:
    from tritonclip.advice.suggestion import Suggestion

# Options of `run` that a script may be given by mistake.
_OF_RUN = {"--compare", "--record"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 1 for bad input, 2 for bad usage."""
    try:
        chosen, unknown = _parser().parse_known_args(arguments)
        if unknown:
            chosen.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as end:
        return int(end.code or 0)
    if chosen.command in (None, "doctor"):
        return doctor()
    if chosen.command == "run":
        return run(chosen)
    try:
        return {"find": find, "plot": plot, "suggest": suggest}[chosen.command](chosen)
    except ModuleNotFoundError as error:
        package = (error.name or "tritonclip").split(".")[0]
        if package == "tritonclip":
            raise
        print(
            f"python -m tritonclip {chosen.command} needs {package}, which is not installed; "
            'expected the extra: pip install "tritonclip[monitor]". python -m tritonclip suggest '
            "works without it",
            file=sys.stderr,
        )
        return 1
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tritonclip" if Path(sys.argv[0]).stem == "tritonclip" else "python -m tritonclip",
        description="Gradient clipping: checks of the installation, a comparison with torch, and "
        "help to choose max_norm.",
    )
    parser.add_argument(
        "--version", action="version", version=f"tritonclip {tritonclip.__version__}"
    )
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, about, add_arguments in (
        ("doctor", "print versions, devices and backends, and run a short self-test", None),
        (
            "run",
            "run a script as it is, with torch's functions that clip replaced by tritonclip's",
            _add_run,
        ),
        ("find", "train for short times under many limits, and say which is best", _add_find),
        (
            "suggest",
            "suggest max_norm from FILE, a recorder's .csv",
            _add_history,
        ),
        (
            "plot",
            "draw the norms in FILE, with candidates for max_norm",
            _add_plot,
        ),
    ):
        description = f"{about[0].upper()}{about[1:]}."
        command = commands.add_parser(name, help=about, description=description)
        # Else the usage of the whole program is printed for an option that a command has not.
        command.set_defaults(parser=command)
        if add_arguments is not None:
            add_arguments(command)
    return parser


def _add_run(command: argparse.ArgumentParser) -> None:
    """The arguments of `run`, before those of the script."""
    command.usage = f"{command.prog} [-h] [--compare] [--record FILE] [-m] SCRIPT [ARGUMENT ...]"
    command.add_argument(
        "--compare",
        action="store_true",
        help="let torch's functions and tritonclip's take turns, and print at the end which is "
        "faster on the gradients of this run, by how much, and whether it matters",
    )
    command.add_argument(
        "--record",
        metavar="FILE",
        help="write the norm of every call to FILE, a new .csv file, for suggest and plot",
    )
    command.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module, as for python -m"
    )
    command.add_argument(
        "script", metavar="SCRIPT or -m MODULE", help="a file, or with -m a module"
    )
    rest = command.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="of the script"
    )
    # Else Python 3.11 and before say so where there is no script.
    rest.required = False


def _add_find(command: argparse.ArgumentParser) -> None:
    """The arguments of `find`, those of `find_max_norm`."""
    command.add_argument(
        "train",
        metavar="MODULE:NAME",
        help="a generator function train(clip), in a module that can be imported from here or in "
        "a file (train.py:train): it makes its model, optimizer and data, calls clip(parameters) "
        "in each step and yields the loss",
    )
    command.add_argument(
        "--rules", metavar="MODULE:NAME", help="a list of rules, which compete with limits"
    )
    command.add_argument(
        "--limits", type=_positive, nargs="+", metavar="LIMIT", help="those to try"
    )
    command.add_argument("--steps", type=_at_least(4), default=200, help="of a trial (200)")
    command.add_argument("--seeds", type=_at_least(1), default=3, help="how many (3)")


def _add_history(command: argparse.ArgumentParser) -> None:
    """The arguments of `suggest`."""
    command.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="written by tritonclip.record or by python -m tritonclip run --record",
    )
    command.add_argument(
        "--warmup",
        type=_at_least(0),
        metavar="STEPS",
        help="steps to leave out at the start; found by default",
    )


def _add_plot(command: argparse.ArgumentParser) -> None:
    """The arguments of `plot`."""
    _add_history(command)
    command.add_argument(
        "--out",
        type=Path,
        metavar="FIGURE",
        help="a .png or .svg file; by default FILE as .png, if there is none",
    )


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return number


def _at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
        return int(text)

    return number


def run(chosen: argparse.Namespace) -> int:
    """Runs a script under `patch_torch`, as Python would; errors of the script are raised."""
    process, is_first, file = os.getpid(), rank() == 0, chosen.record
    try:
        recorder = None
        if file is not None:
            recorder = tritonclip.record(file, write=is_first)
            if is_first and recorder.path.exists():
                raise FileExistsError(f"{file} exists; expected the name of a new file")
        program = (script.module if chosen.is_module else script.script)(chosen.script)
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    late = sorted({argument.partition("=")[0] for argument in chosen.arguments} & _OF_RUN)
    if is_first and late:
        print(
            f"tritonclip run: {' and '.join(late)} after {chosen.script} went to the script; "
            "options of run stand before it: python -m tritonclip run "
            f"{' '.join(late)} ... {'-m ' * chosen.is_module}{chosen.script}",
            file=sys.stderr,
        )
    log, failed = CallLog(compares=chosen.compare), True
    patch = TorchPatch(recorder, log)
    try:
        with patch:
            program.run(chosen.arguments)
        failed = False
    except SystemExit as end:
        failed = end.code not in (None, 0)
        raise
    finally:
        # A fork that the script made may end here, too.
        if os.getpid() == process:
            if recorder is not None:
                recorder.close()
            if is_first:
                report = log.report(patch.served_by_torch, failed=failed)
                print(f"tritonclip run: {report}", file=sys.stderr)
            if is_first and recorder is not None:
                command = f"python -m tritonclip suggest {file}"
                is_there = recorder.steps > 0
                said = f"norms are in {file}: {command}" if is_there else "no norm was recorded"
                print(said, file=sys.stderr)
    return 0


def _fail(error: BaseException) -> int:
    """Prints an error; with its traceback where it is not of the library itself."""
    text = str(error)
    if not is_own(error):
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        text += '; what a script does belongs under if __name__ == "__main__":'
    print(f"Error: {text}", file=sys.stderr)
    return 1


def _object_of(target: str) -> Any:
    """The object that MODULE:NAME or FILE.py:NAME says; a module may lie in the current folder."""
    module, _, name = target.rpartition(":")
    if not (module and name):
        raise ValueError(
            f"expected MODULE:NAME or FILE.py:NAME, as in package.mymodule:train, got {target!r}"
        )
    folder = Path.cwd()
    if module.endswith(".py"):
        file = Path(module).resolve()
        if not file.is_file():
            raise ValueError(f"expected a file, got {module}; there is none in {folder}")
        folder, module = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    # Not by pkgutil.resolve_name, which takes no file like train-gpt.py.
    return operator.attrgetter(name)(importlib.import_module(module))


def find(chosen: argparse.Namespace) -> int:
    """Prints the answer of `find_max_norm`; returns 1 where there is none."""
    try:
        found = tritonclip.find_max_norm(
            _object_of(chosen.train),
            limits=chosen.limits,
            rules=_object_of(chosen.rules) if chosen.rules else (),
            steps=chosen.steps,
            seeds=chosen.seeds,
            progress=_show_progress,
        )
    except KeyboardInterrupt:
        print("Interrupted before a limit was tried: there is no answer yet.", file=sys.stderr)
        return 130
    except (Exception, SystemExit) as error:
        return _fail(error)
    print(found)
    return 0


def _show_progress(done: int, most: int) -> None:
    """Shows every twentieth of the steps."""
    if done * 20 // most != (done - 1) * 20 // most:
        print(f"{done:,} of at most {most:,} steps; Ctrl-C: an answer now", file=sys.stderr)


def suggest(chosen: argparse.Namespace) -> int:
    """Prints the suggestion."""
    suggestion = tritonclip.suggest_max_norm(chosen.file, warmup=chosen.warmup)
    judged = f"Judged by the norms of {suggestion.steps} steps"
    if suggestion.warmup:
        judged += f", without a warm-up of {suggestion.warmup} steps at the start"
    print(f"{judged}; {_left_out(suggestion)}.")
    if not math.isnan(suggestion.spike_score):
        print(f"SpikeScore: {suggestion.spike_score:.2%}")
    print(suggestion)
    limit = "none" if suggestion.max_norm is None else f"{suggestion.max_norm:g}"
    only = ", if the limit has to be fixed" if suggestion.verdict == "drift" else ""
    print(f"max_norm: {limit}{only}")
    return 0


def _left_out(suggestion: Suggestion) -> str:
    counts = ((suggestion.nonfinite, "NaN or inf"), (suggestion.zeros, "0"))
    found = ", ".join(f"{n} that are {value}" for n, value in counts if n)
    return f"left out: {found}" if found else "no norm is NaN, inf or 0"


def plot(chosen: argparse.Namespace) -> int:
    """Draws the norms, with candidates for max_norm, and prints the path of the figure."""
    from tritonclip.advice import plot as figure
    from tritonclip.monitor.history import read

    history = read(chosen.file)
    target = chosen.out or chosen.file.with_suffix(".png")
    if chosen.out is None and target.exists():
        raise FileExistsError(f"{target} exists; to replace it, write --out {target}")
    suggestion = None
    try:
        suggestion = tritonclip.suggest_max_norm(history, warmup=chosen.warmup)
    except ValueError as error:
        # The run is too short for one.
        print(f"The figure has no candidates: {error}", file=sys.stderr)
    figure.save(target, history, suggestion)
    print(target)
    return 0

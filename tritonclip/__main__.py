"""`python -m tritonclip [doctor | suggest FILE | plot FILE]`, installed as `tritonclip`.

Without a command it is the doctor, which needs nothing but the package.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tritonclip import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 1 for bad input, 2 for bad usage."""
    try:
        chosen = _parser().parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    if chosen.command in (None, "doctor"):
        from tritonclip.doctor import examine

        return examine()
    try:
        from tritonclip import commands
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
    try:
        if chosen.command == "plot":
            commands.plot(chosen.file, chosen.out, chosen.warmup, chosen.run)
        else:
            commands.suggest(chosen.file, chosen.warmup, chosen.run)
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tritonclip" if Path(sys.argv[0]).stem == "tritonclip" else "python -m tritonclip",
        description="Gradient clipping: checks of the installation, and help to choose max_norm.",
    )
    parser.add_argument("--version", action="version", version=f"tritonclip {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, about in (
        ("doctor", "print versions, devices and backends, and run a short self-test"),
        ("suggest", "suggest max_norm from FILE, a recorder's .csv or .jsonl"),
        ("plot", "draw the norms in FILE, with candidates for max_norm"),
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


if __name__ == "__main__":
    sys.exit(main())

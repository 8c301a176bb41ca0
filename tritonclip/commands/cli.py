"""The command line: `python -m tritonclip`, installed as `tritonclip`.

Each command is a module of this folder, with `add_arguments` and `main`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tritonclip

# The commands in the order of the help, each with a description.
COMMANDS = {
    "doctor": "print versions, devices and backends, and run a short self-test",
    "run": "run a script as it is, with torch's functions that clip replaced by tritonclip's",
    "find": "train for short times under many limits, and say which is best",
    "suggest": "suggest max_norm from FILE, a recorder's .csv",
    "plot": "draw the norms in FILE, with candidates for max_norm",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 1 for bad input, 2 for bad usage."""
    given, of_script = [*(sys.argv[1:] if arguments is None else arguments)], []
    if given[:1] == ["run"]:
        given, of_script = _module("run").split(given)
    try:
        chosen, unknown = _parser().parse_known_args(given)
        if unknown:
            chosen.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as end:
        return int(end.code or 0)
    if chosen.command == "run":
        # Errors of the script are raised unchanged.
        return int(chosen.main(chosen, of_script))
    try:
        return int(chosen.main(chosen))
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
    parser.set_defaults(parser=parser, main=_module("doctor").main)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, about in COMMANDS.items():
        description = f"{about[0].upper()}{about[1:]}."
        command = commands.add_parser(name, help=about, description=description, allow_abbrev=False)
        # An unknown option then prints the usage of the command, not of the whole program.
        command.set_defaults(parser=command, main=_module(name).main)
        _module(name).add_arguments(command)
    return parser


def _module(command: str) -> Any:
    return importlib.import_module(f"tritonclip.commands.{command}")

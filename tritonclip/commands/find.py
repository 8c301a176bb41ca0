"""`python -m tritonclip find`: `find_max_norm` of a training in a module or a file."""

import argparse
import importlib
import operator
import sys
import traceback
from pathlib import Path
from typing import Any

from tritonclip.messages import is_own


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `find_max_norm`."""
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
    command.add_argument("--limits", type=float, nargs="+", metavar="LIMIT", help="those to try")
    command.add_argument("--steps", type=int, default=200, help="of a trial (200)")
    command.add_argument(
        "--seconds",
        type=float,
        help="in place of --steps: 200, and three times as many again and again, while these are "
        "too few to tell and so many seconds are not over",
    )
    command.add_argument("--seeds", type=int, default=3, help="how many (3)")


def main(chosen: argparse.Namespace) -> int:
    """Prints the answer of `find_max_norm`; returns 1 after an error, and 130 if interrupted."""
    from tritonclip.advice.finder import find_max_norm

    try:
        found = find_max_norm(
            _object_of(chosen.train),
            limits=chosen.limits,
            rules=_object_of(chosen.rules) if chosen.rules else (),
            steps=chosen.steps if chosen.seconds is None else None,
            seconds=chosen.seconds or 0.0,
            seeds=chosen.seeds,
        )
    except KeyboardInterrupt:
        print("Interrupted before a limit was tried: there is no answer yet.", file=sys.stderr)
        return 130
    except (Exception, SystemExit) as error:
        text = str(error)
        if not is_own(error):
            traceback.print_exception(error)
            text = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            text += '; what a script does belongs under if __name__ == "__main__":'
        print(f"Error: {text}", file=sys.stderr)
        return 1
    print(found)
    return 0


def _object_of(target: str) -> Any:
    """Imports the object MODULE:NAME or FILE.py:NAME; modules may lie in the current folder."""
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
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ValueError(
            f"there is no module {error.name} in {folder}, nor among those that are installed; "
            f"expected one that can be imported, or a file: train.py:{name}"
        ) from None
    # pkgutil.resolve_name would refuse a file like train-gpt.py.
    return operator.attrgetter(name)(found)

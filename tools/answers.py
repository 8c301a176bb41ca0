"""The answers of public calls on random gradient lists, a line for each, to compare two versions.

    python tools/answers.py --lists 20000 --seed 1 --out after.txt
    python tools/answers.py --compare before.txt after.txt

A list depends on the seed and its index alone. Take one and the same copy of this file, digests.py
and random_calls.py for both versions: they need no other file. The columns:

- `bits`: of every gradient with the memory around it, every result, every `_version`;
- `errors`, `warnings`: their classes, in order; `messages`: their texts.

Where messages must not differ either, pass `--messages`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from digests import COLUMNS, Digest
from random_calls import INTERPRETED, KINDS

import tritonclip
from tritonclip import ClippedOptimizer

BACKENDS = ("triton",) if INTERPRETED else ("native", "torch")
# Lists of one process, so that what is said once in a process is said in each block.
BLOCK = 100
# Lists with other answers that are named.
SHOWN = 10


def answer_of(index: int, seed: int, backend: str, *, shown: bool = False) -> str:
    """The line of a list."""
    choice = random.Random(f"{seed} {index}")
    kind, verifies = KINDS[index % len(KINDS)], choice.random() < 0.05
    digest = Digest(shown=shown)
    with contextlib.ExitStack() as stack:
        stack.enter_context(tritonclip.use_backend(backend))
        if verifies:
            stack.enter_context(tritonclip.verify())
        # A version that fails outside of the calls has other answers, too.
        digest.call(kind, choice, digest)
    return digest.line(index, kind.__name__, backend)


def answers_from(first: int, seed: int, end: int) -> list[str]:
    """The lines of a block of lists, for each backend."""
    indices = range(first, min(first + BLOCK, end))
    return [answer_of(index, seed, backend) + "\n" for index in indices for backend in BACKENDS]


def say_once() -> None:
    """Has the library warn of mistakes of which it warns once in a process."""
    weight = torch.nn.Parameter(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            tritonclip.clip_([weight], 1.0)
        optimizer = ClippedOptimizer(torch.optim.SGD([weight], lr=0.1), 1.0)
        for _ in range(3):
            weight.grad = torch.ones(2)
            tritonclip.clip_([weight], 1.0)
            optimizer.step()


def lines_of(path: str) -> Iterator[dict[str, str]]:
    for line in Path(path).read_text().splitlines():
        yield dict(zip(COLUMNS, line.split("\t"), strict=True))


def compare(before: str, after: str, texts: bool) -> int:
    """Prints the first lists with other answers, and counts all; 1 where there is one."""
    lists: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for old, new in itertools.zip_longest(lines_of(before), lines_of(after)):
        if old is None or new is None:
            print("one file has more lists than the other")
            return 1
        lists[old["backend"]] += 1
        if found := [c for c in COLUMNS if old[c] != new[c] and (texts or c != "messages")]:
            what = f"{old['kind']} on {old['backend']}: {', '.join(found)}"
            others[what] += 1
            if others.total() <= SHOWN:
                print(f"--only {old['index']} differs in {what}")
    for what, count in sorted(others.items()):
        print(f"{count:8} {what}")
    counts = " and ".join(f"{n} on {backend}" for backend, n in lists.items())
    print(f"{others.total()} differ, of {counts}")
    return int(bool(others))


def main() -> int:
    """Writes the answers, shows those of one list, or compares two files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lists", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the list to begin with")
    parser.add_argument("--out", default="answers.txt")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--only", type=int, help="print all of one list")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--messages", action="store_true", help="compare messages, too")
    options = parser.parse_args()
    if options.compare:
        before, after = options.compare
        return compare(before, after, options.messages)

    torch.set_num_threads(1)
    say_once()
    print(f"{tritonclip.__file__}, torch {torch.__version__}", file=sys.stderr)
    if options.only is not None:
        for backend in BACKENDS:
            print(answer_of(options.only, options.seed, backend, shown=True))
        return 0
    end = options.first + options.lists
    blocks = range(options.first, end, BLOCK)
    work = functools.partial(answers_from, seed=options.seed, end=end)
    forks = multiprocessing.get_context("fork")
    with forks.Pool(options.jobs, maxtasksperchild=1) as pool, Path(options.out).open("w") as file:
        for lines in pool.imap(work, blocks):
            file.writelines(lines)
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

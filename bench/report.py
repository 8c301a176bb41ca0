"""From committed rows to the README's tables and figures.

Between `<!-- bench:NAME -->` and `<!-- /bench -->` in the README stands what the rows of
bench/results/NAME.json give, and nothing else. Beside the JSON lie NAME.md, with every row and
column, and NAME-RULE.svg. `<!-- bench:NAME rivals -->` asks for a table of all rivals, without
figures. Rows whose results were not checked, or found wrong, are refused. Only a rival's row
without any time may say that its result was wrong: NAME.md repeats that.

`python -m bench.report` writes all of it; with `--check` it writes nothing and fails where
anything is not what the rows give.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import rows as results
from bench.figures import digest, draw, figures
from bench.rows import Row
from bench.tables import BY, OURS, full_table, notes, ratio_table, rival_table, step, summary

README = Path(__file__).parents[1] / "README.md"
# What a figure says of where it was measured; the page beside it says all.
IN_FIGURES = ("cpu", "device", "threads", "torch", "triton", "commit", "date")
SECTION = re.compile(r"(<!-- bench:([\w-]+)( rivals)? -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)


class RefusedError(ValueError):
    """Rows or a README that nothing may be made from."""


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Provenance and rows of a file.

    Raises:
        RefusedError: there is no such file, it has no rows of this suite, a row's check failed or
            was not made, devices are mixed, or two rows are of one rival and case.
    """
    if not path.exists():
        raise RefusedError(f"{path} does not exist: measure first, with --out {path}")
    try:
        origin, rows = results.read(path)
    except (KeyError, TypeError) as error:
        raise RefusedError(f"{path} holds no rows of this suite: {error}") from error
    if not rows or not origin:
        raise RefusedError(f"{path} has no rows, or no provenance")
    wrong = [_describe(row) for row in rows if row.correct is not True and not _is_remark(row)]
    if wrong:
        raise RefusedError(f"{path}: results wrong or not checked: {'; '.join(wrong)}")
    devices = sorted({row.device for row in rows})
    if len(devices) > 1:
        raise RefusedError(f"{path} mixes devices: {', '.join(devices)}; write one file each")
    seen = [_describe(row) for row in rows]
    twice = sorted({one for one in seen if seen.count(one) > 1})
    if twice:
        raise RefusedError(f"{path}: measured twice: {'; '.join(twice)}")
    return origin, rows


def _is_remark(row: Row) -> bool:
    """Whether a row only says that another library's result was wrong and therefore not timed."""
    times = (row.wall_us, row.host_us, row.device_us, row.graph_us, row.ratio)
    return not row.rival.startswith(OURS) and set(times) == {None}


def _describe(row: Row) -> str:
    return f"{row.list} {row.dtype} {row.rule} {step(row.clipped)} {row.rival}"


def origin_line(origin: dict[str, Any], names: Sequence[str] = ()) -> str:
    """Provenance in one line; of some names only, if any are given."""
    return ", ".join(
        f"{name} {value}" for name, value in origin.items() if not names or name in names
    )


def section(name: str, origin: dict[str, Any], rows: Sequence[Row], link: str) -> str:
    """What stands between a section's markers.

    Args:
        name: of the section.
        origin: the rows' provenance.
        rows: checked rows.
        link: path from the README to the folder of the results.
    """
    images = "\n".join(
        f"![Ratio to torch by {BY[rule]}, list and dtype]({link}/{name}-{rule}.svg)"
        for rule in figures(rows)
    )
    return (
        f"Measured on: {origin_line(origin)}.\n\n{summary(rows)} Each cell: time of the best torch "
        "variant of the run over tritonclip's, median and quartiles of paired repetitions; norm "
        f"off by: the largest relative error in any dtype of the row. {notes(rows)}\n\n"
        f"{ratio_table(rows)}\n\n{images}\n\n"
        f"Every rival and column: [{name}.md]({link}/{name}.md); rows: "
        f"[{name}.json]({link}/{name}.json).\n"
    )


def rivals_section(name: str, origin: dict[str, Any], rows: Sequence[Row], link: str) -> str:
    """What stands between the markers of a section of rivals; arguments as of `section`."""
    return (
        f"Measured on: {origin_line(origin)}. Each cell: median time of a call, and the ratio to "
        "it of the time of the best torch variant of the run, median of paired repetitions.\n\n"
        f"{rival_table(rows)}\n\n"
        f"Every column: [{name}.md]({link}/{name}.md); rows: [{name}.json]({link}/{name}.json).\n"
    )


def page(name: str, origin: dict[str, Any], rows: Sequence[Row]) -> str:
    """NAME.md: every row."""
    return (
        f"# All rows of {name}.json\n\nMeasured on: {origin_line(origin)}. A cell is empty where "
        f"nothing was measured. `python -m bench.report` writes this file.\n\n{full_table(rows)}\n"
    )


class Report:
    """All files that follow from a README's markers.

    Args:
        readme: the file with the markers.
        folder: where results lie, below the README's folder.

    Attributes:
        texts: what each text file should hold.
        drawings: rows and provenance of each figure.
    """

    def __init__(self, readme: Path, folder: Path) -> None:
        self.texts: dict[Path, str] = {}
        self.drawings: dict[Path, tuple[list[Row], str]] = {}
        text = readme.read_text()
        wanted = {match[2]: bool(match[3]) for match in SECTION.finditer(text)}
        if not wanted or len(wanted) != text.count("<!-- bench:"):
            raise RefusedError(
                f"{readme}: expected <!-- bench:NAME --> ... <!-- /bench --> around each table, "
                f"found {len(wanted)} whole ones of {text.count('<!-- bench:')}"
            )
        link = folder.resolve().relative_to(readme.resolve().parent).as_posix()
        sections = {}
        for name, of_rivals in wanted.items():
            origin, rows = load(folder / f"{name}.json")
            self.texts[folder / f"{name}.md"] = page(name, origin, rows)
            if of_rivals:
                sections[name] = rivals_section(name, origin, rows, link)
                continue
            sections[name] = section(name, origin, rows, link)
            for rule, drawn in figures(rows).items():
                self.drawings[folder / f"{name}-{rule}.svg"] = (
                    drawn,
                    origin_line(origin, IN_FIGURES),
                )
        self.texts[readme] = SECTION.sub(lambda m: m[1] + sections[m[2]] + m[5], text)

    def write(self) -> None:
        """Writes every file."""
        for path, text in self.texts.items():
            path.write_text(text)
        for path, (rows, origin) in self.drawings.items():
            draw(rows, path, origin)

    def stale(self) -> list[Path]:
        """Files that are missing or are not what the rows give."""
        texts = [
            path
            for path, text in self.texts.items()
            if not path.exists() or path.read_text() != text
        ]
        return texts + [
            path
            for path, (rows, _) in self.drawings.items()
            if not path.exists() or digest(rows) not in path.read_text()
        ]


def main(argv: list[str] | None = None) -> int:
    """Writes or checks the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of the rows")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where stale")
    options = parser.parse_args(argv)
    try:
        report = Report(options.readme, options.results)
    except RefusedError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    if not options.check:
        report.write()
        return 0
    stale = report.stale()
    for path in stale:
        print(f"{path} is not what the rows give: run python -m bench.report", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

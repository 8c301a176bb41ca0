"""Imports between the files of the library go one way, those within functions and for types too."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in (ROOT / "tritonclip").rglob("*.py")
}
# What surrounds the core, and can be taken away: `nox -s rooms`.
ROOMS = ("advice", "backward", "commands", "flat", "functional", "integrations")


def imports_of(file: Path) -> list[tuple[int, str]]:
    """The lines of imports, and what each imports: a file or a name in it."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found += [(node.lineno, f"{source}{alias.name}") for alias in node.names]
    return found


def room_of(path: str) -> str:
    """The folder or file at the top of the library in which an import lies."""
    return (*path.split("."), "")[1]


def test_imports_point_down_the_list_of_folders():
    page = (ROOT / "docs" / "architecture.md").read_text()
    cells = re.findall(r"^\| (`.*?`) \|", page.partition("\n## Layout\n")[2], re.MULTILINE)
    rows = [re.findall(r"`(?:tritonclip/)?([\w./]+?)(?:\.py|/)?`", cell) for cell in cells]
    level = {name: row for row, names in enumerate(rows) for name in names}

    for file in FILES.values():
        name, *_ = file.relative_to(ROOT / "tritonclip").with_suffix("").parts
        for line, path in imports_of(file):
            room = room_of(path.replace("backends._native", "native"))
            if path.startswith("tritonclip") and room in level:
                assert level[room] >= level[name], f"{file}:{line} imports {path}"


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_outside_a_room_imports_it(room):
    """But the public names and commands, which `noxfile.py` takes away with it."""
    others = {"__init__", "__main__", "commands", room}
    for file in FILES.values():
        name, *_ = file.relative_to(ROOT / "tritonclip").with_suffix("").parts
        if name not in others:
            for line, path in imports_of(file):
                inside = path.startswith("tritonclip.") and room_of(path) == room
                assert not inside, f"{file}:{line} imports {path}"


def test_files_import_one_another_in_no_circle():
    graph = {}
    for name, file in FILES.items():
        paths = [path for _, path in imports_of(file)]
        sources = {path if path in FILES else path.rpartition(".")[0] for path in paths}
        graph[name] = sources - {name, "tritonclip"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"files import one another: {error.args[1]}")

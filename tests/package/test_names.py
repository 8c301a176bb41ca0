"""Every public name has an example, and every name of another library has a match."""

import contextlib
import doctest
import importlib
import re
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import tritonclip
from tritonclip import functional, hints, rules


def _public() -> list[Any]:
    """Every public object, under its name."""
    modules = [tritonclip, functional]
    for name in ("lightning", "transformers"):
        # The packages that they serve are optional.
        with contextlib.suppress(ImportError):
            modules.append(importlib.import_module(f"tritonclip.integrations.{name}"))
    return [
        pytest.param(getattr(module, name), id=name)
        for module in modules
        for name in module.__all__
    ]


@pytest.mark.parametrize("value", _public())
def test_every_public_name_has_an_example(value):
    examples = doctest.DocTestParser().get_examples(value.__doc__ or "")
    assert any(one.want for one in examples)


def test_every_match_is_there():
    for name, text in hints.NAMES.items():
        path = re.split(r"[ ,(]", text)[0]
        assert name not in tritonclip.__all__
        # Their packages are optional.
        assert path.startswith("integrations.") or attrgetter(path)(tritonclip)


def test_public_names_are_few_and_listed():
    assert len({*tritonclip.__all__} - {*rules.__all__}) <= 22
    assert set(tritonclip.__all__) <= set(dir(tritonclip))
    of_ipython = {"load_ipython_extension", "unload_ipython_extension"}
    assert set(tritonclip._LAZY) - of_ipython <= set(tritonclip.__all__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with 3.11")
def test_versions_of_python_and_torch_are_the_same_everywhere():
    """In the package's data, in CI, in the sessions and on the pages."""
    import tomllib

    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    minor = r"3\.\d\d"
    classifiers = "\n".join(project["classifiers"])
    versions = re.findall(rf"Python :: ({minor})", classifiers)
    oldest, newest = versions[0], versions[-1]
    assert project["requires-python"] == f">={oldest}"
    workflow = (root / ".github/workflows/tests.yml").read_text()
    assert set(re.findall(rf'- python: "({minor})"', workflow)) == set(versions)
    sessions = re.search(r"session\(python=\[(.*)\]\)", (root / "noxfile.py").read_text())
    assert sessions is not None
    assert re.findall(minor, sessions[1]) == versions
    torch = re.search(r'"torch>=(\d\.\d+)', (root / "pyproject.toml").read_text())
    assert torch is not None
    in_ci = re.findall(r"torch==(\d\.\d+)\.0", workflow)
    assert torch[1] in in_ci
    newest_torch = max(in_ci, key=lambda version: int(version.partition(".")[2]))
    for page in ("README.md", "docs/index.md"):
        text = " ".join((root / page).read_text().split())
        assert f"Python {oldest} or newer" in text
        assert f"Python {newest} and PyTorch {newest_torch} are the newest in CI" in text
        assert re.search(rf"(PyTorch {re.escape(torch[1])} or newer|torch from {torch[1]},)", text)

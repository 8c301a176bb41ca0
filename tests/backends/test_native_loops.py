"""The C extension is loaded where it was built, and says why where it cannot serve."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from tritonclip.backends import native


@pytest.mark.parametrize(
    ("spec", "module", "reason"),
    [
        (None, None, r"imported from its sources in .*gcc or clang.*pip install -e \."),
        (True, ImportError("too short"), r"cannot be loaded \(too short\): install a C compiler"),
        (True, SimpleNamespace(), r"built from another version: install a C compiler"),
    ],
    ids=["sources", "broken", "older"],
)
def test_an_extension_that_cannot_serve_says_why(monkeypatch, spec, module, reason):
    def import_module(name):
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(native, "find_spec", lambda name: spec)
    monkeypatch.setattr("tritonclip.backends.native.importlib.import_module", import_module)
    loops, fault = native.load()
    assert loops is None
    assert re.search(reason, fault)


def test_an_installation_without_the_extension_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    reason = "tritonclip was installed without its C extension: install a C compiler"
    assert native.load()[1].startswith(reason)
    monkeypatch.setattr("sys.platform", "win32")
    assert native.load()[1].endswith("which need GCC or Clang: run Python in WSL")

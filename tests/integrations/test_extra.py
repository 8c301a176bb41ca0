"""Integrations without their packages: the error says what to install, and why it failed."""

from __future__ import annotations

import pytest

from helpers.workers import python


@pytest.mark.parametrize(
    ("module", "packages"),
    [
        ("lightning", ("lightning", "pytorch_lightning")),
        ("transformers", ("transformers",)),
    ],
    ids=["lightning", "transformers"],
)
def test_integration_names_the_extra_of_a_package_that_is_missing(module, packages):
    done = python(
        "-c",
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({packages!r}))\n"
        "try:\n"
        f"    importlib.import_module('tritonclip.integrations.{module}')\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error, error.name, type(error.__cause__).__name__, sep='|')\n",
    )
    message, name, cause = done.stdout.strip().split("|")
    assert f"needs {module}, which could not be imported" in message
    assert 'expected the extra: pip install "tritonclip[integrations]"' in message
    assert (name.partition(".")[0], cause) == (module, "ModuleNotFoundError")


def test_integration_says_what_a_package_lacks_itself(tmp_path):
    """Rather than that pytorch_lightning is missing, too."""
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text("import nothing_of_this_name\n")
    done = python(
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.modules['pytorch_lightning'] = None\n"
        "try:\n"
        "    import tritonclip.integrations.lightning\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error, error.name, sep='|')\n",
    )
    message, name = done.stdout.strip().split("|")
    assert name == "nothing_of_this_name"
    assert 'pip install "tritonclip[integrations]"' in message

"""The documentation site: `make docs` builds it into build/docs; warnings are errors."""

from __future__ import annotations

import os
import re
from importlib.metadata import metadata
from typing import Any

import tritonclip
from tritonclip import rules

URLS = dict(one.split(", ") for one in metadata("tritonclip").get_all("Project-URL"))

project = "tritonclip"
author = project_copyright = "The tritonclip authors"
version = release = tritonclip.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxext.opengraph",
]
templates_path = ["_templates"]
suppress_warnings = ["config.cache"]
# `name` in docstrings is code.
default_role = "literal"
# Dashes alone: quotation marks can be copied into code.
smartquotes_action = "D"
add_function_parentheses = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# References that lead nowhere are warnings. Where the inventories of torch and Python can be read,
# their names are links; a build without a network leaves them as text.
nitpicky = True
if os.environ.get("READTHEDOCS"):
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|collections|os|pathlib|lightning|transformers)\b.*"),
    # In signatures: types that have no page, by their modules or by their short names.
    (
        r"py:class",
        r"tritonclip\.[a-z_.]+\.[A-Z]\w*|Tensor|Module|Optimizer|ProcessGroup|DeviceMesh",
    ),
    (
        r"py:class",
        r"T|Bound|Copies|Nonfinite|Parameters|Reduction|StepNonfinite|TorchPatch",
    ),
]

myst_enable_extensions = ["colon_fence", "dollarmath"]
# Headings have the anchors that GitHub gives them.
myst_heading_anchors = 3

# The stable members of public classes; others are internal, or of torch. A class that is not here
# lists none.
autosummary_context = {
    "stable_members": {
        "AdaptiveRule": "start, advance",
        "ClipState": "steps, state_dict, load_state_dict",
        "ClipStats": "steps, measured_steps, clipped_steps, skipped_steps, overflowed_steps, "
        "consecutive_skips, last_coefficient, last_limit, summary, state_dict, load_state_dict",
        "ClippedOptimizer": "step, zero_grad, add_param_group, state_dict, load_state_dict, clip, "
        "nonfinite, skip_above, loss, max_consecutive_skips, recorder",
        "FlatGradients": "zero_, attach_, buffers",
        "GradScaler": "unscale_, step",
        "Recorder": "add_, flush, close, state_dict, load_state_dict, is_closed, writes",
        "Rule": "limit",
    }
}
# The reference lists the rules by themselves: it shows this docstring.
rules.__doc__ = """All rules:

.. currentmodule:: tritonclip
.. autosummary::
   :toctree: api
   :nosignatures:

""" + "".join(f"   {name}\n" for name in rules.__all__ if name.startswith("ClipBy"))
napoleon_use_ivar = True
napoleon_use_rtype = False
# The trainers that tritonclip serves need not be installed.
autodoc_mock_imports = ["lightning", "transformers"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
# A long signature has a line for each argument.
maximum_signature_line_length = 60
autodoc_member_order = "bysource"

html_theme = "furo"
# Colours of code that are readable by WCAG 2 on either background; they come with furo.
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_title = f"tritonclip {release}"
html_favicon = "_static/logo.svg"
html_logo = "_static/logo.svg"
html_theme_options = {
    "source_repository": URLS["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}
ogp_site_url = f"{URLS['Documentation']}/"
ogp_image = "_images/train_rnn.png"
ogp_description_length = 160
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_show_sourcelink = False
# The API reference lists every name.
html_use_index = False


def link_pages(*event: Any) -> None:
    """Makes links of the pages that a docstring names as files, for readers of the source."""
    lines = event[-1]
    lines[:] = [re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`/\1`", line) for line in lines]


def hide_icons(app: Any, page: str, template: str, context: dict[str, Any], *_: Any) -> None:
    """Leaves out "view" and "edit" of a generated page, whose file is not in the repository."""
    if page.startswith("api/"):
        context["page_source_suffix"] = ""


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("html-page-context", hide_icons)
    app.connect("autodoc-process-docstring", link_pages)

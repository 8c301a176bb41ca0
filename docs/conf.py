"""The documentation site: `make docs` builds it into build/docs; warnings are errors."""

from __future__ import annotations

import os

import tritonclip

project = "tritonclip"
author = project_copyright = "The tritonclip authors"
version = release = tritonclip.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
templates_path = ["_templates"]
suppress_warnings = ["config.cache"]

# References that lead nowhere are warnings. Where the inventories of torch and Python can be read,
# their names are links; a build without a network leaves them as text.
nitpicky = True
if os.environ.get("READTHEDOCS"):
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
nitpick_ignore_regex = [(r"py:.*", r"(torch|collections|os|pathlib|lightning|transformers)\b.*")]

myst_enable_extensions = ["colon_fence", "dollarmath"]
# Headings have the anchors that GitHub gives them.
myst_heading_anchors = 3

napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"

html_theme = "furo"
# Colours of code that are readable by WCAG 2 on either background; they come with furo.
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_title = "tritonclip"
html_favicon = "favicon.svg"
html_show_sourcelink = False
# The API reference lists every name.
html_use_index = False

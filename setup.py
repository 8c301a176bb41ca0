"""Builds the C extension and the README of package indexes; pyproject.toml has everything else.

Without a C compiler tritonclip is installed without the extension, and warns when it first clips on
a CPU.
"""

import re
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.config.pyprojecttoml import read_configuration

# One binary for all versions; free-threaded Python has no stable ABI.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildAnew(build_ext):
    """Builds the extension anew each time, so that a failed build leaves no older binary."""

    def build_extension(self, ext: Extension) -> None:
        """Removes the last binary first."""
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().build_extension(ext)


URLS = read_configuration("pyproject.toml", expand=False)["project"]["urls"]


def absolute(link: re.Match[str]) -> str:
    """Makes a README link to a file of the repository absolute, for package indexes."""
    image, text, file, anchor = link.groups(default="")
    if page := re.fullmatch(r"docs/(.*)\.(?:md|rst)", file):
        return f"[{text}]({URLS['Documentation']}/{page[1]}.html{anchor})"
    return f"{image}[{text}]({URLS['Repository']}/{'raw' if image else 'blob'}/main/{file}{anchor})"


README = Path("README.md").read_text(encoding="utf-8")
README = re.sub(r"(!?)\[([^]]*)\]\((?!https?:)([\w./-]+)(#[\w-]+)?\)", absolute, README)

setup(
    long_description=re.sub(
        r'(src|srcset)="(?!https?:)', rf'\1="{URLS["Repository"]}/raw/main/', README
    ),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": BuildAnew},
    ext_modules=[
        Extension(
            "tritonclip.backends._native",
            sources=["native/module.c"],
            # Source distributions include the files that are named here.
            depends=sorted(str(path) for path in Path("native").glob("*.h")),
            define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE else [],
            # Loops of comparisons become vector instructions only if exception flags may be lost.
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math"],
            py_limited_api=STABLE,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {},
)

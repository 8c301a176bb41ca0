"""Builds the C extension; all else is in pyproject.toml.

Without a C compiler tritonclip is installed without it, and says so when it first clips on a CPU.
"""

import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# One binary for all versions; free-threaded Python has no stable ABI.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildAnew(build_ext):
    """Builds always: no binary of other sources is left where a build fails."""

    def build_extension(self, ext: Extension) -> None:
        """Removes the last binary first."""
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildAnew},
    ext_modules=[
        Extension(
            "tritonclip.backends._native",
            sources=["native/module.c"],
            # So that a source distribution has them.
            depends=sorted(str(path) for path in Path("native").glob("*.h")),
            define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE else [],
            # Loops of comparisons become vector instructions only where no exception flag is
            # observed.
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math"],
            py_limited_api=STABLE,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {},
)

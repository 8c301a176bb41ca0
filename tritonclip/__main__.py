"""`python -m tritonclip [doctor | suggest FILE | plot FILE]`.

Without a command it is the doctor, which needs nothing but the package.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Runs a command; returns the exit status."""
    if list(arguments) in ([], ["doctor"]):
        from tritonclip.doctor import examine

        return examine()
    try:
        from tritonclip.commands import run
    except ModuleNotFoundError as error:
        package = (error.name or "tritonclip").split(".")[0]
        if package == "tritonclip":
            raise
        print(
            f"python -m tritonclip {arguments[0]} needs {package}, which is not installed; "
            'expected the extra: pip install "tritonclip[monitor]". Without it there is '
            "python -m tritonclip doctor",
            file=sys.stderr,
        )
        return 1
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

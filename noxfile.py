"""Sessions over many versions; `make test` covers the pinned ones. Run `nox -s triton_matrix`."""

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True

INTERPRET = {"TRITON_INTERPRET": "1"}


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """Run every test on each supported Python, with the pinned versions."""
    install(session)
    session.run(
        "python", "-m", "pytest", "-n2", "-m", "not codegen and not wheel", *session.posargs
    )
    check_kernels(session)


@nox.session
@nox.parametrize("triton", ["3.4.0", "3.6.0", "3.9.0"])
def triton_matrix(session: nox.Session, triton: str) -> None:
    """Interpret and compile the kernels with the oldest, a middle and the newest Triton."""
    install(session)
    # Without its dependencies: a CUDA build of torch asks for one exact Triton.
    session.install("--no-deps", f"triton=={triton}")
    if triton < "3.7":
        # Its interpreter fails on newer numpy: "only 0-dimensional arrays can be converted".
        session.install("numpy<2.4")
    check_kernels(session)


@nox.session
def soak(session: nox.Session) -> None:
    """Clip random lists for an hour, with threads, forks and interrupts; `-- --minutes 5`: less."""
    install(session)
    session.run("python", "tests/soak.py", *session.posargs, env=INTERPRET)


def install(session: nox.Session) -> None:
    """Install the pinned test environment, without build isolation as the Makefile does."""
    session.install("-c", "constraints.txt", "setuptools")
    session.install("-c", "constraints.txt", "--no-build-isolation", "-e", ".[test]")


def check_kernels(session: nox.Session) -> None:
    """Run the behaviour tests through the interpreter, then compile for every target."""
    marks = "not codegen and not wheel"
    session.run("python", "-m", "pytest", "-n2", "-m", marks, *session.posargs, env=INTERPRET)
    session.run("python", "-m", "pytest", "-n2", "-m", "codegen", *session.posargs)

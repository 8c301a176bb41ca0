"""Sessions over many versions; `make test` covers the pinned ones. Run `nox -s triton_matrix`."""

from pathlib import Path

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True

INTERPRET = {"TRITON_INTERPRET": "1"}


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14"])
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
def exhaustive(session: nox.Session) -> None:
    """Run the cases that `make test` leaves out, as plain tests and through the interpreter."""
    install(session)
    tests = ("python", "-m", "pytest", "-n2", "--dist", "loadgroup", "-m", "exhaustive")
    session.run(*tests, *session.posargs)
    session.run(*tests, *session.posargs, env=INTERPRET)


@nox.session
def mutants(session: nox.Session) -> None:
    """Change the core in one place at a time, and list changes that no test notices.

    `-- --sample 300 --seed 1 tritonclip/rules` for so many of them, of some files. Run again, it
    goes on where it was ended; it begins anew for another commit. Tests that fork, start processes
    or interpret kernels are not asked about lines that only these run.
    """
    copy = enter_copy(session)
    install(session)
    session.install("-c", "constraints.txt", "cosmic-ray==8.7.0", "coverage==7.17.3")
    session.run(
        "python", "tools/mutants.py", "--results", f"../{copy.name}-results", *session.posargs
    )


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run the tests of the loops in C, of the last commit, under GCC's sanitizers; on Linux."""
    enter_copy(session)
    flags = (
        "-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    )
    install(session, CC="gcc", CFLAGS=flags, LDFLAGS=flags)
    # Both before Python: one looks for exceptions of C++ where it starts, which torch throws.
    found = [
        str(session.run("gcc", f"-print-file-name={name}", external=True, silent=True)).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    # Python never frees all of its memory; a test asks for more than there is.
    options = "detect_leaks=0:allocator_may_return_null=1"
    environment = {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": options}
    built = "from tritonclip.backends import native; assert native.loops, native.fault"
    session.run("python", "-c", built, env=environment)
    tests = [*map(str, sorted(Path("tests/backends").glob("test_native*.py")))]
    tests += ["tests/functional/test_c_loops.py", "tests/rules/test_adaptive.py"]
    session.run("python", "-m", "pytest", "-n2", *tests, *session.posargs, env=environment)


@nox.session
def soak(session: nox.Session) -> None:
    """Clip random lists for an hour, with threads, forks and interrupts; `-- --minutes 5`: less."""
    install(session)
    session.run(
        "python", "tools/soak.py", *session.posargs, env={**INTERPRET, "PYTHONPATH": "tests"}
    )


@nox.session
def answers(session: nox.Session) -> None:
    """Write the answers to random lists; `-- --compare before.txt after.txt` for two versions."""
    install(session)
    session.run("python", "tools/answers.py", *session.posargs)


@nox.session
def trainers(session: nox.Session) -> None:
    """Train by packages that are no extra, under `patch_torch` and without."""
    install(session)
    session.install("-c", "constraints.txt", "--no-build-isolation", "-e", ".[integrations]")
    # Without their dependencies, which ask for versions that exclude each other. torchvision loads
    # beside the torch of its own version and build alone.
    needed = (
        "antlr4-python3-runtime==4.9.3 blobfile cloudpickle datasets dill docstring-parser "
        "farama-notifications gymnasium kagglehub multiprocess omegaconf pandas pyarrow "
        "sentencepiece shtab spmd-types tiktoken torchao==0.13.0 torchdata torchvision==0.28.0 "
        "tyro xxhash"
    )
    packages = (
        "stable-baselines3==2.9.2 timm==1.0.31 torchtitan==0.3.0 torchtune==0.6.1 trl==1.16.0"
    )
    session.install("--no-deps", *packages.split(), *needed.split())
    tests = "tests/integrations/test_patched_packages.py"
    session.run("python", "-m", "pytest", tests, *session.posargs)


def enter_copy(session: nox.Session) -> Path:
    """Go to a copy of the last commit, which a session may change."""
    commit = str(session.run("git", "rev-parse", "--short", "HEAD", external=True, silent=True))
    copy = Path(session.create_tmp(), commit.strip())
    if not copy.exists():
        session.run("git", "clone", "--quiet", ".", str(copy), external=True)
    session.chdir(copy)
    # What an earlier run left changed.
    session.run("git", "checkout", "--quiet", ".", external=True)
    return copy


def install(session: nox.Session, **environment: str) -> None:
    """Install the pinned test environment, without build isolation as the Makefile does."""
    session.install("-c", "constraints.txt", "setuptools")
    tests = ("--no-build-isolation", "-e", ".[test]")
    session.install("-c", "constraints.txt", *tests, env=environment)


def check_kernels(session: nox.Session) -> None:
    """Run the behaviour tests through the interpreter, then compile for every target."""
    marks = "not codegen and not wheel"
    session.run("python", "-m", "pytest", "-n2", "-m", marks, *session.posargs, env=INTERPRET)
    session.run("python", "-m", "pytest", "-n2", "-m", "codegen", *session.posargs)

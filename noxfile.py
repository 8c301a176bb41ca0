"""Long checks, such as `nox -s triton_matrix`; `make test` tests the pinned versions alone."""

import ast
import itertools
import random
import re
import shutil
import time
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
    # --no-deps, because a CUDA build of torch requires one exact Triton.
    session.install("--no-deps", f"triton=={triton}")
    if triton < "3.7":
        # Older interpreters fail on newer numpy: "only 0-dimensional arrays can be converted".
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

    `-- --sample 300 --seed 1 tritonclip/rules` tries 300 changes in some files. An interrupted run
    is resumed, unless the commit has changed. Tests that fork, start processes or interpret kernels
    are left out, so that lines which only they run are listed as not run.
    """
    copy = enter_copy(session)
    install(session)
    session.install("-c", "constraints.txt", "cosmic-ray==8.7.0", "coverage==7.17.3")
    session.run(
        "python", "tools/mutants.py", "--results", f"../{copy.name}-results", *session.posargs
    )


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run the tests of the last commit's loops in C under GCC's sanitizers; needs Linux."""
    enter_copy(session)
    flags = (
        "-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    )
    install(session, CC="gcc", CFLAGS=flags, LDFLAGS=flags)
    # The sanitizer looks at its start for libstdc++, whose exceptions torch throws: preload both.
    found = [
        str(session.run("gcc", f"-print-file-name={name}", external=True, silent=True)).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    # Python never frees all of its memory, and a test asks for more memory than there is.
    options = "detect_leaks=0:allocator_may_return_null=1"
    environment = {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": options}
    built = "from tritonclip.backends import native; assert native.loops, native.fault"
    session.run("python", "-c", built, env=environment)
    tests = [*map(str, sorted(Path("tests/backends").glob("test_native*.py")))]
    tests += ["tests/functional/test_c_loops.py", "tests/rules/test_adaptive.py"]
    session.run("python", "-m", "pytest", "-n2", *tests, *session.posargs, env=environment)


@nox.session
def soak(session: nox.Session) -> None:
    """Repeat all tests of random examples with other seeds for an hour; `-- 2` for two minutes.

    They run by turns as plain tests and through the interpreter. To repeat a round that failed,
    give pytest its `--hypothesis-seed`.
    """
    install(session)
    end = time.monotonic() + 60 * float(session.posargs[0] if session.posargs else 60)
    environments = itertools.cycle(({}, INTERPRET))
    while time.monotonic() < end:
        seed = random.randrange(2**32)
        session.run(
            *("python", "-m", "pytest", "-q", "-x", "-n2", "-m", "hypothesis"),
            *("--hypothesis-profile=soak", f"--hypothesis-seed={seed}"),
            env=next(environments),
        )


@nox.session
def rooms(session: nox.Session) -> None:
    """Take away each folder that stands around the core in turn, and run the other tests."""
    enter_copy(session)
    install(session)
    for room in session.posargs or ("advice", "backward", "flat", "functional", "integrations"):
        session.run("git", "checkout", "--quiet", ".", external=True)
        take_away(room)
        # Pages, examples and benchmarks need the whole product.
        whole = [f"--ignore=tests/{part}" for part in ("package", "bench")]
        marks = "not codegen and not exhaustive"
        session.run("python", "-m", "pytest", "-n2", "--dist", "loadgroup", "-m", marks, *whole)


@nox.session
def trainers(session: nox.Session) -> None:
    """Train with packages that no extra installs, under `patch_torch` and without it."""
    install(session)
    session.install("-c", "constraints.txt", "--no-build-isolation", "-e", ".[integrations]")
    # --no-deps, because their dependencies exclude each other. A torchvision loads only with the
    # torch of the same version and build.
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


def take_away(room: str) -> None:
    """Delete a folder with its tests, its public names, and the commands that it serves."""
    init, line = Path("tritonclip/__init__.py"), Path("tritonclip/commands/cli.py")
    names = {room}
    for node in ast.walk(ast.parse(init.read_text())):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"tritonclip.{room}."):
            names |= {alias.name for alias in node.names}
    drop_lines(init, rf'tritonclip\.{room}\b|import {room}\b|"({"|".join(names)})"')
    for command in Path("tritonclip/commands").glob("*.py"):
        if command != line and f"tritonclip.{room}" in command.read_text():
            drop_lines(line, rf'^    "{command.stem}": ')
            command.unlink()
            Path(f"tests/commands/test_{command.stem}.py").unlink()
    for folder in ("tritonclip", "tests"):
        shutil.rmtree(f"{folder}/{room}")


def drop_lines(path: Path, pattern: str) -> None:
    """Delete the lines of a file in which a pattern is found."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not re.search(pattern, line)))


def enter_copy(session: nox.Session) -> Path:
    """Go to a copy of the last commit, which a session may change."""
    commit = str(session.run("git", "rev-parse", "--short", "HEAD", external=True, silent=True))
    copy = Path(session.create_tmp(), commit.strip())
    if not copy.exists():
        session.run("git", "clone", "--quiet", ".", str(copy), external=True)
    session.chdir(copy)
    # Undo changes of an earlier run.
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

"""Sessions over many versions; `make test` covers the pinned ones. Run `nox -s triton_matrix`."""

from pathlib import Path

import nox

# Files that are mutated, and the tests that should notice.
MUTATED = {
    "tritonclip/backends": "tests/backends tests/clip tests/rules tests/engine/test_plan.py",
    "tritonclip/engine": "tests/engine tests/clip tests/rules",
    "tritonclip/flat/flat_gradients.py": "tests/flat tests/engine/test_concurrency.py",
    "tritonclip/rules": "tests/rules tests/clip",
}
# One change of each kind. Most operators of a kind say nothing more, and those for | change
# annotations.
MUTANTS = """
[cosmic-ray]
module-path = ["{path}"]
timeout = 900.0
excluded-modules = []
test-command = "python -m pytest -x -q -p no:cacheprovider {tests}"

[cosmic-ray.distributor]
name = "local"

[cosmic-ray.filters.operators-filter]
exclude-operators = [
    "core/RemoveDecorator",
    "core/ReplaceUnaryOperator_(USub|UAdd|Invert)",
    "core/ReplaceBinaryOperator_(?!Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Add|Pow_Mul)",
    "core/ReplaceComparisonOperator_(?!Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Is_IsNot|IsNot_Is)",
]
"""

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
def mutants(session: nox.Session) -> None:
    """Change the core in one place at a time, and list changes that no test notices.

    `-- tritonclip/rules` for some of MUTATED. Run again, it goes on where it was ended.
    """
    copy = Path(session.create_tmp(), "copy")
    if not copy.exists():
        session.run("git", "clone", "--quiet", ".", str(copy), external=True)
    session.chdir(copy)
    install(session)
    session.install("cosmic-ray>=8.4")
    for path in session.posargs or MUTATED:
        name = path.replace("/", "-")
        config, results = f"../{name}.toml", f"../{name}.sqlite"
        if not Path(results).exists():
            Path(config).write_text(MUTANTS.format(path=path, tests=MUTATED[path]))
            session.run("cosmic-ray", "baseline", config)
            session.run("cosmic-ray", "init", config, results)
            session.run("cr-filter-operators", results, config)
        # What an earlier run left changed.
        session.run("git", "checkout", "--quiet", ".", external=True)
        session.run("cosmic-ray", "exec", config, results)
        session.run("cr-report", "--surviving-only", "--show-diff", results)


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

"""The source distribution, and its wheel, run where nothing else of the repository is seen."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.metadata import Metadata

# One worker builds the distributions for all.
pytestmark = [pytest.mark.wheel, pytest.mark.xdist_group("wheel")]

ROOT = Path(__file__).parents[2]
# -S reads no .pth files: torch is found here, the editable install is not.
LIBRARIES = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))

INSTALLED = {
    *(str(path.relative_to(ROOT)) for path in (ROOT / "tritonclip").rglob("*.py")),
    *(f"tritonclip/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")),
}


def run(*command, cwd, python=sys.executable, **environment):
    """Run Python to its end and return what it printed."""
    done = subprocess.run(
        [str(python), *map(str, command)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    # A copy: what an earlier build left in the repository must not get in.
    source = tmp_path_factory.mktemp("source") / "tritonclip"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    run("-m", "build", "--sdist", "--no-isolation", "--outdir", source / "dist", cwd=source)
    (path,) = (source / "dist").glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    """The one folder of the source distribution."""
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, folder)
    (unpacked,) = folder.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", out, cwd=unpacked)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def place(wheel, tmp_path_factory):
    """Where the wheel is installed, and nothing else."""
    place = tmp_path_factory.mktemp("place")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", place, wheel, cwd=place)
    return place


@pytest.fixture
def run_clean(place, tmp_path):
    """Runs Python with the installed wheel and its dependencies, in an empty folder."""
    path = os.pathsep.join([str(place), *LIBRARIES])
    return lambda *command: run("-S", *command, cwd=tmp_path, PYTHONPATH=path)


def test_sdist_holds_the_repository(sdist):
    if not (ROOT / ".git").exists():
        pytest.skip("asks git, which knows nothing of an archive")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    # Settings of git and CI, and a link to the folder of the kernels.
    tracked = {name for name in listed if not name.startswith(".") and (ROOT / name).is_file()}
    assert not tracked - names
    assert not {name for name in names if name.endswith((".so", ".pyc"))}


def test_sdist_runs_its_tests(unpacked, tmp_path):
    """After an installation, as the first lines of CONTRIBUTING.md have it."""
    run("-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text("\n".join(LIBRARIES))
    python = tmp_path / "venv" / "bin" / "python"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-I", "-e")
    run(*install, unpacked, cwd=tmp_path, python=python)
    test = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "not wheel")
    part = ("tests/test_named_norms.py", "tests/test_messages.py", "tests/package/test_readme.py")
    assert "[100%]" in run(*test, *part, "-k", "not docs_code", cwd=unpacked, python=python)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}

    assert "tritonclip/kernels/__init__.py" in INSTALLED
    # One for all versions of Python; with the functions' types.
    extension = {"tritonclip/backends/_native.abi3.so", "tritonclip/backends/_native.pyi"}
    data = {"tritonclip/py.typed", "tritonclip/advice/figures.mplstyle"}
    assert names - metadata == INSTALLED | extension | data
    assert any(name.endswith("/LICENSE") for name in metadata)


def test_wheel_describes_itself_with_links_that_lead_somewhere(wheel):
    """As a package index shows it: no link is relative, and each has its page or file."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(name))
    urls, text = metadata.project_urls, metadata.description
    assert urls
    assert text
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text)
    targets = ["".join(link).partition("#")[0] for link in links]
    assert [target for target in targets if not target.startswith("https://")] == []
    pages = [t for t in targets if t.startswith(urls["Documentation"])]
    files = [t for t in targets if re.match(f"{urls['Repository']}/(raw|blob)/main/", t)]
    assert pages
    assert files
    for page in pages:
        name = page.removeprefix(urls["Documentation"]).removesuffix(".html")
        assert [*(ROOT / "docs").glob(f"{name.strip('/')}.*")], page
    for file in files:
        assert (ROOT / file.partition("/main/")[2]).exists(), file


def test_wheel_imports_every_module_from_its_own_files(place, run_clean):
    pytest.importorskip("triton", reason="tritonclip.kernels needs triton")
    packages = ("lightning", "transformers")
    missing = {f"tritonclip/integrations/{n}.py" for n in packages if find_spec(n) is None}
    files = sorted(INSTALLED - {"tritonclip/__main__.py"} - missing)
    modules = [file.removesuffix(".py").removesuffix("/__init__") for file in files]
    printed = run_clean(
        "-c",
        "import importlib, sys\n"
        "for name in sys.argv[1:]: print(importlib.import_module(name).__file__)\n",
        *(module.replace("/", ".") for module in modules),
    )
    assert printed.split() == [str(place / file) for file in files]


def test_wheel_imports_without_triton_or_trainers(run_clean):
    # torch first: what torch imports by itself is not ours.
    run_clean(
        "-c",
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import tritonclip\n"
        "new = set(sys.modules) - before\n"
        "optional = {'triton', 'lightning', 'transformers', 'accelerate'}\n"
        "loaded = [name for name in new if name.split('.')[0] in optional or 'kernels' in name]\n"
        "assert not loaded, loaded\n",
    )


def test_wheel_installs_the_command(place, run_clean):
    assert run_clean(place / "bin" / "tritonclip", "--version").startswith("tritonclip ")
    assert "usage: tritonclip doctor" in run_clean(place / "bin" / "tritonclip", "doctor", "-h")


def test_wheel_self_test_passes(run_clean):
    assert "tritonclip" in run_clean("-m", "tritonclip")

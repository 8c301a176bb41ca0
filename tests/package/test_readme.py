"""The Python of the README and of docs/ runs as it stands, on a CPU.

The blocks of the README share their names, those of docs/ with the blocks of the same section.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tritonclip
from tritonclip.integrations import patching

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, *DOCS]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def _sections() -> dict[str, list[str]]:
    """The Python blocks of each section of docs/ that has any."""
    sections = {}
    for page in DOCS:
        # Its blocks need several processes: tests/distributed/test_docs.py runs them.
        if page.stem == "distributed":
            continue
        # The tutorial is one program, which trains for fewer steps here.
        shorter = page.read_text().replace("steps=300", "steps=120")
        parts = [shorter.replace("steps=100", "steps=40")]
        if page.stem != "tutorial":
            parts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
        for part in parts:
            if blocks := BLOCK.findall(part):
                title = part.partition("\n")[0].strip("# ")
                sections[f"{page.stem}-{_anchor(title)}"] = blocks
    return sections


def _anchor(heading: str) -> str:
    """The fragment that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _names() -> dict[str, Any]:
    """The objects that the pages take as given: a model with gradients, its optimizer, a GAN."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    parts = {name: torch.nn.Linear(3, 2) for name in ("body", "head", "embedding")}
    batches = [torch.ones(4, 3) * i for i in range(1, 5)]
    return {
        "torch": torch,
        "tritonclip": tritonclip,
        "model": model,
        "loss": _loss_of(model, batches[0]),
        "loss_of": _loss_of,
        "batch": batches[0],
        "loader": batches,
        "accumulate": 2,
        "device": "cpu",
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "generator": torch.nn.Linear(3, 2),
        "critic": SimpleNamespace(**parts),
    }


def _loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).float().square().mean()
    return loss


def _lightning(names: dict[str, Any], request: pytest.FixtureRequest) -> None:
    names["lightning"] = pytest.importorskip("lightning", reason="needs tritonclip[integrations]")


def _trainer(names: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """A small language model, and texts for two batches."""
    transformers = pytest.importorskip(
        "transformers", reason="needs tritonclip[integrations]", exc_type=ImportError
    )
    from integrations.hugging_face import language_model, sequences

    request.getfixturevalue("fresh_accelerate")
    names["transformers"] = transformers
    names["model"], names["data"] = language_model(), sequences(4)


def _accelerate(names: dict[str, Any], request: pytest.FixtureRequest) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs tritonclip[integrations]")
    request.getfixturevalue("fresh_accelerate")
    names["accelerator"] = accelerate.Accelerator(cpu=True)
    batches: Any = torch.ones(8, 3)
    names["loader"] = torch.utils.data.DataLoader(batches, 4)


def _opacus(names: dict[str, Any], request: pytest.FixtureRequest) -> None:
    pytest.importorskip("opacus", reason="needs tritonclip[test]")


def _muon(names: dict[str, Any], request: pytest.FixtureRequest) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("needs torch 2.9, the first with Muon")


def _compile(names: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Graphs of torch.compile, without the code that Inductor takes seconds to compile."""
    compiled = functools.partial(torch.compile, backend="aot_eager")
    request.getfixturevalue("monkeypatch").setattr(torch, "compile", compiled)


def _long_run(names: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Some hundred steps."""
    names["loader"] = names["loader"] * 50


def _short(names: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Trials that are shorter than by default."""
    shorter = functools.partial(tritonclip.find_max_norm, steps=30)
    request.getfixturevalue("monkeypatch").setattr(tritonclip, "find_max_norm", shorter)


SECTIONS = _sections()
SETTINGS: dict[str, Callable[[dict[str, Any], pytest.FixtureRequest], None]] = {
    "trainers-pytorch-lightning": _lightning,
    "trainers-hugging-face-trainer": _trainer,
    "trainers-accelerate": _accelerate,
    "per_example-gradients-of-opacus": _opacus,
    "recipes-muon-and-other-matrix-optimizers": _muon,
    "compile-torchcompile-and-cuda-graphs": _compile,
    "choosing_max_norm-record-and-ask": _long_run,
    "finding_max_norm-finding-a-limit-by-trying": _short,
}
TUTORIAL = "tutorial-tutorial-from-no-clipping-to-a-limit"


def _run(section: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """The names of a section after its blocks ran."""
    names = given or _names()
    for block in SECTIONS[section]:
        exec(block, names)
    return names


def test_readme_code_runs(capsys):
    names = _names()
    del names["tritonclip"]

    for block in BLOCK.findall(README.read_text()):
        exec(block, names)

    assert "'clipped_share'" in capsys.readouterr().out


@pytest.fixture
def torchs_functions() -> Iterator[None]:
    """Gives them back, where a page replaces them for the rest of the program."""
    yield
    for patch in list(patching._patches):
        patch.remove()


@pytest.mark.usefixtures("torchs_functions")
# The Trainer asks for pinned memory by default.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
# Lightning's advice where TensorBoard is missing.
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0")
# Of torch, about the hooks of Opacus where inputs need no gradient.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("section", [name for name in SECTIONS if name != TUTORIAL])
def test_docs_code_runs(section, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    names = _names()
    if section in SETTINGS:
        SETTINGS[section](names, request)

    _run(section, names)


@pytest.mark.usefixtures("set_threads")
def test_docs_tutorial_runs_and_clipping_helps_as_it_says(tmp_path, monkeypatch):
    pytest.importorskip("sklearn", reason="needs tritonclip[examples]")
    monkeypatch.chdir(tmp_path)

    (without, found) = _run(TUTORIAL)["results"].values()

    assert max(without) + 0.1 < min(found)


def test_docs_parameter_groups_are_clipped_by_their_rules():
    names = _run("optimizer-parameter-groups")
    critic = names["critic"]
    for part in vars(critic).values():
        part.weight.grad, part.bias.grad = torch.full((2, 3), 9.0), torch.full((2,), 9.0)

    names["critic_optimizer"].step()

    norms = [float(part.weight.grad.norm()) for part in vars(critic).values()]
    torch.testing.assert_close(norms, [1.0, 0.5, 9.0 * 6**0.5], rtol=1e-5, atol=0)
    assert critic.body.bias.grad.tolist() == [9.0, 9.0]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_docs_muon_takes_its_matrices_as_they_are_and_the_rest_is_clipped():
    names = _run("recipes-muon-and-other-matrix-optimizers")
    model = names["model"]
    for optimizer in (names["adamw"], names["optimizer"]):
        model.weight.grad, model.bias.grad = torch.full((2, 3), 9.0), torch.tensor([3.0, 4.0])

        optimizer.step()

        assert model.weight.grad.tolist() == [[9.0] * 3] * 2
        torch.testing.assert_close(model.bias.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
        assert float(optimizer.stats.last_norm) == 5.0


def test_docs_micro_batches_are_clipped_one_by_one():
    names = _names() | {"accumulate": 5}  # one more than there are, so that no step is taken
    model, weights = copy.deepcopy(names["model"]), list(names["model"].parameters())
    sums = [torch.zeros_like(weight) for weight in weights]
    for batch in names["loader"]:
        model.zero_grad()
        _loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sums = [total + p.grad for total, p in zip(sums, model.parameters(), strict=True)]

    assert float(_run("recipes-micro-batches", names)["norm"]) > 1.0

    torch.testing.assert_close([weight.grad for weight in weights], sums)


def test_docs_reinforcement_learning_leaves_out_outliers_at_any_level():
    """Norms about 400, where a bound of 100 would leave out every step, then about 4."""
    names = _run("recipes-reinforcement-learning")
    optimizer, (weight, bias) = names["optimizer"], names["model"].parameters()
    numbers = random.Random(0)
    for step in range(400):
        norm = numbers.lognormvariate(0.0, 0.3) * (400.0 if step < 200 else 4.0)
        norm *= 50.0 if step == 150 else 1.0
        weight.grad, bias.grad = torch.zeros(2, 3), torch.tensor([norm, 0.0])
        optimizer.step()

    summary = optimizer.stats.summary()
    assert summary["skipped_steps"] == 1
    assert 0.03 < summary["clipped_share"] < 0.15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_is_found(page):
    text = page.read_text()

    assert len(BLOCK.findall(text)) == text.count("```python")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in map(_anchor, HEADING.findall(target.read_text())), f"{path}#{anchor}"


@pytest.mark.parametrize("page", ["architecture", "decisions"])
def test_page_names_files_that_exist(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    folders = ("tritonclip", "kernels", "native", "docs", "tests", "tools", "bench")
    files = [
        f"/{file.relative_to(ROOT)}" for name in folders for file in (ROOT / name).rglob("*.*")
    ]

    named = set(re.findall(r"\w[\w/]*\.(?:py|h|c)\b", text))

    assert {name for name in named if not any(f.endswith(f"/{name}") for f in files)} == set()


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.rst").read_text()
    listed = set(re.findall(r"^   ([\w.]+)$", text, flags=re.MULTILINE))
    names = {*tritonclip.__all__, *tritonclip.functional.__all__} - {"functional"}
    # Of `optimizer.stats`, and of the result of `record`.
    names |= {"monitor.stats.ClipStats", "monitor.recorder.Recorder"}
    # Not imported: the packages that they serve are optional.
    for file in (ROOT / "tritonclip" / "integrations").glob("*.py"):
        if match := re.search(r"^__all__ = (\[.*?\])", file.read_text(), re.MULTILINE | re.DOTALL):
            names |= {f"{file.stem}.{name}" for name in ast.literal_eval(match[1])}

    assert listed == names


def test_performance_summary_has_the_results_of_its_pages():
    summary = ROOT / "docs" / "performance.md"
    rows = [line for line in summary.read_text().splitlines() if line.startswith("|")]

    compared = 0
    for row in rows:
        results = re.findall(r"(median|worst) (?=([\d.]+x))", row)
        pages = "".join((summary.parent / path).read_text() for path, _ in LINK.findall(row))
        said = set(re.findall(r"(median|worst)(?: is)? ([\d.]+x)", pages))
        assert {*results} <= said, row
        compared += len(results)
    assert compared >= 14


def test_pages_say_to_install_from_the_address_of_the_project():
    address = re.search(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)

    assert address is not None
    for page in (README, ROOT / "docs" / "install.md"):
        found = set(re.findall(r"pip install [^\n]*git\+(https://[\w./-]+)", page.read_text()))
        assert found == {address[1]}, page


def test_readme_stays_short():
    text = README.read_text()

    assert len(text.splitlines()) <= 150
    assert len(text.encode()) <= 9 * 1024
    cells = itertools.chain.from_iterable(
        line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")
    )
    assert max(len(cell.strip()) for cell in cells) < 60
    assert max(map(len, text.splitlines())) < 300


def test_workflow_builds_the_site_as_read_the_docs_does():
    if not (ROOT / ".readthedocs.yaml").exists():
        pytest.skip("an archive has no settings of services")
    settings = (ROOT / ".readthedocs.yaml").read_text()
    workflow = (ROOT / ".github" / "workflows" / "docs.yml").read_text()
    installs = re.findall(r"^ +- (pip install .*)$", settings, re.MULTILINE)

    assert installs
    assert "fail_on_warning: true" in settings
    for command in (*installs, "python -m sphinx -T -W --keep-going -b html docs "):
        assert f"- run: {command}" in workflow


def test_pre_commit_runs_the_pinned_ruff():
    if not (ROOT / ".pre-commit-config.yaml").exists():
        pytest.skip("an archive has no settings of git")
    pinned = re.search(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    hook = re.search(r"^    rev: v(\S+)$", hooks, re.MULTILINE)

    assert pinned is not None
    assert hook is not None
    assert hook[1] == pinned[1]

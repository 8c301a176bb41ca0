"""The Python of the README and of docs/ runs as it stands, on a CPU.

A reader copies one block and runs it, after the set-up at the top of its page where there is one:
so does a test of each block. The blocks of a page also run one after the other.
"""

import ast
import copy
import functools
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import tritonclip
from tritonclip.integrations import patching

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, *DOCS]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def _anchor(heading: str) -> str:
    """The fragment that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _blocks() -> Iterator[Any]:
    """The blocks of each page, one by one after the set-up, and all of them in order."""
    for page in PAGES:
        if page.stem == "tutorial":
            continue
        blocks = BLOCK.findall(page.read_text())
        setup = blocks[:1] if "set-up" in page.read_text() else []
        for number, block in enumerate(blocks):
            yield pytest.param([*setup, block], id=f"{page.stem}-{number}")
        # A page of other programs has none.
        if len(blocks) > 1 and page.stem not in OF_PROCESSES:
            yield pytest.param(blocks, id=f"{page.stem}-all")


# Each block of the first shards the model of the set-up; tests/distributed/test_docs.py runs them
# in four processes. Trainers move the model, and wrap it.
OF_PROCESSES = ("distributed", "trainers")
# Needed by some blocks.
OPTIONAL = ("lightning", "transformers", "accelerate", "opacus", "sklearn")


@pytest.fixture
def torchs_functions() -> Iterator[None]:
    """Gives them back, where a page replaces them for the rest of the program."""
    yield
    for patch in list(patching._patches):
        patch.remove()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the process group of a page, and takes its environment away."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of torch.compile without the code that Inductor takes seconds to compile."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.usefixtures("torchs_functions", "processes", "quickly")
# The Trainer asks for pinned memory by default.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
# Lightning's advice where TensorBoard is missing.
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0")
# Of torch, about the hooks of Opacus where inputs need no gradient.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
# Of torch, about FSDP1 on one process, and of its ZeroRedundancyOptimizer.
@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
@pytest.mark.parametrize("blocks", [*_blocks()])
def test_code_runs(blocks, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    text = "".join(blocks)
    for package in OPTIONAL:
        if re.search(rf"^(import|from) {package}\b", text, re.MULTILINE):
            pytest.importorskip(package, reason="needs tritonclip[dev]", exc_type=ImportError)
    if "accelerate" in text or "transformers" in text:
        request.getfixturevalue("fresh_accelerate")
    if "torch.optim.Muon" in text and not hasattr(torch.optim, "Muon"):
        pytest.skip("needs torch 2.9, the first with Muon")

    _run(blocks)


def _run(blocks: list[str], **given: Any) -> dict[str, Any]:
    """The names after blocks ran, in a namespace with nothing but what is given."""
    names: dict[str, Any] = {"__name__": "__main__", **given}
    for block in blocks:
        exec(block, names)
    return names


def _section(page: str, heading: str, count: int | None = None, **given: Any) -> dict[str, Any]:
    """The names after the set-up of a page and the first blocks of a section ran."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    names = _run(BLOCK.findall(text)[:1])
    names.update(given)
    for block in BLOCK.findall(section)[:count]:
        exec(block, names)
    return names


@pytest.mark.usefixtures("set_threads")
def test_docs_tutorial_runs_and_clipping_helps_as_it_says(tmp_path, monkeypatch):
    """One program, which trains for fewer steps here."""
    pytest.importorskip("sklearn", reason="needs tritonclip[examples]")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "tutorial.md").read_text()
    shorter = text.replace("steps=300", "steps=120").replace("steps=100", "steps=40")

    (without, found) = _run(BLOCK.findall(shorter))["results"].values()

    assert max(without) + 0.1 < min(found)


def test_docs_parameter_groups_are_clipped_by_their_rules():
    names = _section("optimizer", "Parameter groups")
    first, _, last = names["model"]
    for p in names["model"].parameters():
        p.grad = torch.full_like(p, 9.0)

    names["optimizer"].step()

    norms = [float(p.grad.norm()) for p in (first.weight, first.bias)]
    torch.testing.assert_close(norms, [1.0, 0.5], rtol=1e-5, atol=0)
    assert all((p.grad == 9.0).all() for p in last.parameters())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_docs_muon_takes_its_matrices_as_they_are_and_the_rest_is_clipped():
    names = _section("recipes", "Muon and other matrix optimizers")
    model, adamw = names["model"], names["adamw"]
    for p in model.parameters():
        p.grad = torch.full_like(p, 9.0)

    adamw.step()

    assert all((p.grad == 9.0).all() for p in model.parameters() if p.dim() == 2)
    others = [p.grad for p in model.parameters() if p.dim() != 2]
    torch.testing.assert_close(float(torch.cat(others).norm()), 1.0, rtol=1e-5, atol=0)


def test_docs_micro_batches_are_clipped_one_by_one(monkeypatch):
    setup = _section("recipes", "Micro-batches", count=0)
    batches = [100 * batch for batch in setup["loader"][:2]]
    model = copy.deepcopy(setup["model"])
    sums = [torch.zeros_like(weight) for weight in model.parameters()]
    for batch in batches:
        model.zero_grad()
        setup["loss_of"](model, batch).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.0
        sums = [total + p.grad for total, p in zip(sums, model.parameters(), strict=True)]

    # No optimizer takes the sum away.
    kept = torch.optim.SGD(setup["model"].parameters(), lr=0.0)
    monkeypatch.setattr(kept, "zero_grad", lambda: None)
    given = {"model": setup["model"], "optimizer": kept, "loader": batches}
    _section("recipes", "Micro-batches", **given)

    torch.testing.assert_close([p.grad for p in setup["model"].parameters()], sums)


def test_docs_reinforcement_learning_leaves_out_outliers_at_any_level():
    """Norms about 400, where a bound of 100 would leave out every step, then about 4."""
    optimizer = _section("recipes", "Reinforcement learning")["optimizer"]
    optimizer.clip = tritonclip.ClipByQuantile(0.9, max_norm=1000.0)
    weight = optimizer.param_groups[0]["params"][0]
    numbers = random.Random(0)
    for step in range(400):
        norm = numbers.lognormvariate(0.0, 0.3) * (400.0 if step < 200 else 4.0)
        norm *= 50.0 if step == 150 else 1.0
        weight.grad = torch.zeros_like(weight)
        weight.grad[0, 0] = norm
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
    # `docs/conf.py` lists the rules.
    listed |= {name for name in tritonclip.rules.__all__ if name.startswith("ClipBy")}
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


def test_advice_is_as_good_as_its_rows_say():
    pattern = re.compile(r"(\d+ of \d+) \| (\d+ of \d+) \|")
    pages = (ROOT / "docs" / name for name in ("choosing_max_norm.md", "performance/training.md"))
    said, measured = ({*pattern.findall(page.read_text())} for page in pages)

    assert len(said) >= 7
    assert said <= measured


def test_pages_are_few_and_short():
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.rst")]

    assert len(pages) <= 16
    assert len([*(ROOT / "docs" / "performance").glob("*.md")]) <= 4
    assert sum(len(page.read_text().split()) for page in pages) <= 20_000


def test_pages_say_to_install_from_the_address_of_the_project():
    address = re.search(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)

    assert address is not None
    for page in (README, ROOT / "docs" / "index.md"):
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

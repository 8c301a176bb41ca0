"""The benchmark of several processes: figures of every layout, ours right by one collective."""

import pytest

from bench import test_distributed as bench
from helpers.processes import in_processes

# Those whose Partial gradients, or whose parts of a sum, take one more.
TWO = "FSDP2 beside a Partial gradient"


@pytest.mark.parametrize("layout", bench.LAYOUTS)
@in_processes(4)
def test_figures_of_ours_are_right(layout: str) -> None:
    figures = bench.figures_of(layout, "tritonclip")
    assert figures["collectives"] == (2 if layout == TWO else 1)
    assert figures["norm_error"] <= 1e-6
    assert "outcome" not in figures


@in_processes(4)
def test_figures_say_what_others_do() -> None:
    expected = {
        "FSDP2": None,
        "FSDP2 beside a plain tensor": "raises RuntimeError",
        "FSDP2, elements of 1e30": "norm inf",
        "FSDP2, elements of 1e-30": "norm 0",
        "FSDP2, order inf": "differs by process",
    }
    found = [bench.figures_of(layout, "torch").get("outcome") for layout in expected]
    assert found == list(expected.values())

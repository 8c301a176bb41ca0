"""Prints what ClippedOptimizer costs beside a call of `clip_` before the same optimizer's step.

The wrapper also finds the rule of each parameter group, keeps norm and coefficient, and counts.
Both sides are interleaved in one process, on the same gradients, and their norms are compared.
"""

import json
import sys
from pathlib import Path
from time import perf_counter

import torch
from cpu_table import LISTS, arguments, provenance, provenance_line, quartiles
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tritonclip

# Repetitions for each one that is asked for, so that short steps are timed as long as long ones.
MORE = {"GPT-2 124M": 1, "1,000 of 64-1,024": 20}


def measure(name: str, max_norm: float, repetitions: int) -> dict[str, object]:
    """Times a step with and without the wrapper; milliseconds as median and quartiles."""
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.zeros(shape, requires_grad=True) for shape in LISTS[name]()]
    fresh = [torch.empty_like(p).normal_(0, 1e-3, generator=generator) for p in parameters]
    for parameter, grad in zip(parameters, fresh, strict=True):
        parameter.grad = grad.clone()
    bare = torch.optim.SGD(parameters, lr=1e-3, foreach=True)
    wrapper = tritonclip.ClippedOptimizer(
        torch.optim.SGD(parameters, lr=1e-3, foreach=True), max_norm
    )

    def refill() -> None:
        for parameter, grad in zip(parameters, fresh, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(grad)

    def with_call() -> torch.Tensor:
        norm = tritonclip.clip_(parameters, max_norm)
        bare.step()
        return norm

    def with_wrapper() -> torch.Tensor:
        wrapper.step()
        return wrapper.stats.last_norm

    times: dict[object, list[float]] = {with_wrapper: [], with_call: []}
    for repetition in range(repetitions * MORE[name] + 1):
        norms = []
        for step, spent in times.items():
            refill()
            start = perf_counter()
            norms.append(step())  # type: ignore[operator]
            if repetition > 0:
                spent.append((perf_counter() - start) * 1e3)
        if not torch.equal(norms[0], norms[1]):
            raise RuntimeError(f"wrong result, not timed: {norms}")
    ours, call = (quartiles(spent) for spent in times.values())
    return {
        "gradients": name,
        "clipped": int(wrapper.stats.clipped_steps) > 0,
        "wrapper_ms": ours,
        "call_ms": call,
        "ratio": call[0] / ours[0],
    }


def main(argv: list[str] | None = None) -> int:
    """Measures all lists, clipped and unclipped, and prints the table."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    console = Console(width=140)
    cases = [(name, limit) for name in LISTS for limit in (1e4, 0.5) if options.only in name]
    rows = [
        measure(name, limit, options.repetitions)
        for name, limit in track(cases, "measuring", console=console, transient=True)
    ]
    table = Table(title="SGD step: ClippedOptimizer against clip_", caption=provenance_line())
    for heading in ("gradients", "step", "wrapper ms (quartiles)", "clip_ ms (quartiles)", "ratio"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        wrapper, call = (
            "{:.2f} ({:.2f} to {:.2f})".format(*row[key])  # type: ignore[misc]
            for key in ("wrapper_ms", "call_ms")
        )
        step = "clipped" if row["clipped"] else "unclipped"
        table.add_row(str(row["gradients"]), step, wrapper, call, f"{row['ratio']:.3f}x")
    console.print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"provenance": provenance(), "rows": rows}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench gpu`, which `make gpu` runs: all that only a GPU can show, in ten minutes.

It prints the environment, runs the tests marked `gpu`, measures the plan "gpu" of `pytest bench`,
times kernels with other tuning constants, and answers questions. One file has all rows. A part that
takes longer than its share is cut off, and its answer says so.

The sweep replaces constants by name, where the verbs of the Triton backend read them. No kernel has
eviction hints to sweep.
"""

from __future__ import annotations

import importlib
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from unittest.mock import patch

import click
import torch

import tritonclip
from bench import codegen, results, timing
from bench.accuracy import EPS, OURS, Gradients, WrongResultError
from bench.codegen import kernel_module, replaced_launch
from bench.results import Row
from bench.workloads import WORKLOADS
from tritonclip.backends.interface import Clip
from tritonclip.samples import Timed, sample

# Seconds of each part: 550 in all, because the last question may take longer.
SHARES = {"tests": 150, "plan": 250, "sweep": 100, "questions": 50}
# Kernels that are swept, and how often each reads or writes all gradients.
SWEPT = {"norm": 1, "scale": 2, "scale, each": 2, "clamp": 1}
# More than the host takes to queue a call.
HOST_US = 200.0
FIGURES = ("device_us", "host_us", "graph_us", "launches", "gb_per_s", "copy_gb_per_s")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
# One gradient, of which times of others were published.
LARGEST = 3_070_000_000
COLD = """import time, torch, tritonclip
p = torch.ones(9, device="cuda", requires_grad=True)
p.grad = torch.ones_like(p)
torch.cuda.synchronize()
start = time.perf_counter()
tritonclip.clip_([p], 1.0).item()
print(time.perf_counter() - start)"""


def run(out: Path, device: torch.device) -> int:
    """Takes all parts in turn, and writes rows as they come; 0 where nothing failed."""
    origin = environment(device) | {"plan": "not finished"}
    rows: list[Row] = []
    with suppress(KeyboardInterrupt):
        for name, part in (("tests", tests), ("plan", plan), ("sweep", sweep), ("questions", ask)):
            click.echo(f"\n{name}: {SHARES[name]} s at most")
            for row in part(device, monotonic() + SHARES[name]):
                rows.append(row)
                results.write(out, origin, rows)
        del origin["plan"]
        results.write(out, origin, rows)
    state = origin.get("plan", "finished")
    click.echo(f"\n{report(rows)}\n\n{state}: {len(rows)} rows in {out}; please send it in")
    if state != "finished":
        return 130
    return int(any(row.correct is False and row.benchmark == "gpu" for row in rows))


def environment(device: torch.device) -> dict[str, Any]:
    """Prints what the doctor says, and where rows are measured."""
    subprocess.run([sys.executable, "-m", "tritonclip"], check=False)
    card = "nvidia-smi --query-gpu=driver_version,clocks.max.memory,power.limit --format=csv"
    origin = results.provenance(device) | {"card": subprocess.getoutput(card)}
    click.echo("\n".join(f"{name}: {value}" for name, value in origin.items()))
    return origin


def answer(question: str, text: str, correct: bool | None = None) -> Row:
    """A question and its answer, in one line."""
    return Row("gpu", {"question": question}, {"answer": " ".join(text.split())[:200]}, correct)


def finished(command: Sequence[str], end: float, grace: float = 10) -> tuple[str, bool | None]:
    """Runs a command whose output is shown: how it ended, and whether well; None if cut off.

    Cut off, it has some seconds of grace.
    """
    start = monotonic()
    process = subprocess.Popen(command)
    try:
        status = process.wait(end - start)
    except subprocess.TimeoutExpired:
        # As Ctrl-C: pytest sums up what it has.
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        return f"cut off after {end - start:.0f} s", None
    finally:
        process.kill()
        process.wait()
    how = "yes" if status == 0 else f"no, exit status {status}"
    return f"{how}, in {monotonic() - start:.0f} s", status == 0


def commands(rows: Path) -> dict[str, list[str]]:
    """The commands of tests and plan; the plan writes its rows to a file."""
    n = min(16, os.cpu_count() or 1)
    tests = f"tests -m gpu -q -n {n} --dist loadgroup"
    plan = "bench --benchmark-only --plan gpu --device cuda -k test_clip --benchmark-max-time 0.1"
    plan += " --provider torch --provider 'torch sum' --rows"
    return {
        "tests": [*PYTEST, *shlex.split(tests)],
        "plan": [*PYTEST, *shlex.split(plan), str(rows)],
    }


def tests(device: torch.device, end: float) -> Iterator[Row]:
    """The tests marked `gpu`."""
    yield answer("Do the tests marked gpu pass?", *finished(commands(Path())["tests"], end))


def plan(device: torch.device, end: float) -> Iterator[Row]:
    """The rows of the plan, as many as were measured."""
    with tempfile.TemporaryDirectory() as folder:
        path, ended = Path(folder, "rows.json"), None
        with suppress(KeyboardInterrupt):
            ended = finished(commands(path)["plan"], end)
        if path.exists():
            yield from results.read(path)[1]
    if ended is None:
        raise KeyboardInterrupt
    yield answer("Are the results of the plan right?", *ended)


class Setting(NamedTuple):
    """The tuning constants of a launch."""

    programs: int  # On a multiprocessor.
    registers: int  # The most of a thread; without effect on ROCm.
    chunk: int
    block: int
    warps: int


def today(kernel: str, itemsize: int) -> Setting:
    """The constants that a kernel is launched with."""
    access, clamp = kernel_module("access"), kernel_module("clamp")
    occupancy, block = access.OCCUPANCY_3X80, access.block_of(itemsize)
    if kernel == "scale, each":
        occupancy = access.OCCUPANCY_2X128
    elif kernel == "clamp":
        occupancy, block = clamp.occupancy_of(itemsize), clamp.block_of(itemsize)
    programs = kernel_module("launch").HIP_PROGRAMS if torch.version.hip else occupancy.programs
    return Setting(programs, occupancy.registers, access.CHUNK, block, access.WARPS)


def settings_of(now: Setting) -> list[Setting]:
    """Today's first, then others that differ from it in one way."""
    occupancies = ((2, 128), (3, 80), (4, 64), (1, 248), (6, 40))
    others = [
        *({"programs": n, "registers": most} for n, most in occupancies),
        *({"chunk": now.chunk * by // 2} for by in (4, 1, 8)),
        *({"block": now.block * by // 2} for by in (1, 4)),
        # As many threads in smaller programs, and as many programs of half the threads.
        *({"warps": now.warps // by, "programs": now.programs * by} for by in (2, 4)),
        {"warps": now.warps // 2, "block": 2 * now.block},
    ]
    return list(dict.fromkeys([now, *(now._replace(**other) for other in others)]))


@contextmanager
def patched(setting: Setting) -> Iterator[None]:
    """The verbs lay out tables and launch kernels with these constants."""
    clamp, launch, norm, tables = map(kernel_module, ("clamp", "launch", "norm", "tables"))
    occupancy = kernel_module("access").Occupancy(setting.programs, setting.registers)

    def block(itemsize: int, norm_type: float = 2.0) -> int:
        return setting.block

    names = ("OCCUPANCY_2X128", "OCCUPANCY_3X80")
    own: dict[str, Any] = {"CHUNK": setting.chunk, **dict.fromkeys(names, occupancy)}
    clamps: dict[str, Any] = {"block_of": block, "occupancy_of": lambda itemsize: occupancy}
    # Compiled kernels are found by other things than these.
    wave: dict[str, Any] = {"_runners": {}, "HIP_PROGRAMS": setting.programs}
    wave["HIP_OPTIONS"] = {"waves_per_eu": max(1, setting.programs * setting.warps // 4)}
    with ExitStack() as stack:
        for change in (
            patch.multiple(backend(), block_of=block, **own),
            patch.multiple(tables, **own),
            patch.object(norm, "block_of", block),
            patch.multiple(clamp, **clamps),
            patch.multiple(launch, **wave),
            patch.dict(launch.OPTIONS, num_warps=setting.warps),
        ):
            stack.enter_context(change)
        yield


def backend() -> Any:
    """The Triton backend, imported when it is asked for."""
    return importlib.import_module("tritonclip.backends.triton")


def verb(kernel: str, gradients: Gradients) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """A call that launches one kernel on gradients, and the check of its result."""
    grads = gradients.grads
    batch = backend().TritonLayout(grads).bind(grads, None)
    rule, limit = "norm", gradients.limit("norm", clipped=True)
    if kernel == "clamp":
        # Nothing lies outside.
        rule, limit = "value", gradients.limit("value", clipped=False)
        call = partial(batch.clamp_, -limit, limit, 1.0)
    elif kernel == "norm":
        call, limit = partial(batch.norm, 2.0, per_gradient=False), math.inf
    elif kernel == "scale":
        norms = batch.norm(2.0, per_gradient=False)
        call = partial(batch.scale_, norms, Clip(2.0, EPS, limit, 1.0))
    else:
        # All are clipped.
        rule, limit = "gradient", min(gradients.norms) / 2
        norms = batch.norm(2.0, per_gradient=True)
        call = partial(batch.scale_each_, norms, Clip(2.0, EPS, limit, 1.0))

    def check(found: Any) -> None:
        if kernel == "norm":
            error = gradients.norm_error("norm", [float(batch.total(found, 2.0, 1.0))])
            if not error <= OURS:
                raise WrongResultError(f"the norm is off by {error:.2g}")
        gradients.check(grads, rule, limit, OURS, EPS)

    return call, check


def swept(kernel: str, gradients: Gradients, setting: Setting) -> Row:
    """One kernel, checked and timed with other constants; without a time where it fails."""
    row = Row("sweep", {"kernel": kernel, "dtype": gradients.dtype, **setting._asdict()}, {}, True)
    gradients.refill()
    try:
        with patched(setting):
            call, check = verb(kernel, gradients)
            check(call())
            time = timing.device_us(Timed(call, gradients.refill), gradients.device, HOST_US)
    except Exception as error:  # Of a compiler or a driver, too.
        row.correct, row.values["answer"] = False, f"{type(error).__name__}: {error}"[:200]
        return row
    row.values |= {"device_us": time, "gb_per_s": SWEPT[kernel] * gradients.n_bytes / (time * 1e3)}
    row.values["copy_gb_per_s"] = timing.copy_gb_per_s(gradients.device)
    return row


def sweep(device: torch.device, end: float, workload: str = "gpt2_124m") -> Iterator[Row]:
    """Every kernel with today's constants, then with others, until time is up."""
    given = [Gradients(WORKLOADS[workload], dtype, device) for dtype in ("float32", "bfloat16")]
    lists = [
        [(k, one, setting) for setting in settings_of(today(k, one.fresh[0].itemsize))]
        for one in given
        for k in SWEPT
    ]
    cases = [case for turn in zip_longest(*lists) for case in turn if case]
    for n, case in enumerate(cases):
        if monotonic() >= end:
            yield answer("Were all settings swept?", f"no, {n} of {len(cases)}")
            return
        yield swept(*case)


def on_gpu(call: Callable[[], Any], device: torch.device, prepare: Any = None) -> float:
    """Microseconds on the GPU alone."""
    return timing.device_us(Timed(call, prepare), device, HOST_US)


def same_bits(device: torch.device) -> str:
    launch, found = kernel_module("launch"), []

    def jit(kernel, device, programs, occupancy, arguments, **constants) -> None:
        kernel[(programs,)](*arguments, **constants, **launch.options_of(occupancy))

    for way in (launch.launch, jit):
        gradients = [Gradients(WORKLOADS["resnet20"], "bfloat16", device) for _ in SWEPT]
        with replaced_launch(way):
            norms, *_ = (verb(*case)[0]() for case in zip(SWEPT, gradients, strict=True))
        found.append([norms, *(grad for own in gradients for grad in own.grads)])
    return "yes" if all(map(torch.equal, *found)) else "no"


def repeats(device: torch.device) -> str:
    grads = Gradients(WORKLOADS["resnet50"], "float32", device).grads
    norms = torch.stack([tritonclip.get_total_norm(grads) for _ in range(2000)])
    return f"{int((norms != norms[0]).sum())} of 2,000 differ from the first"


def spills(device: torch.device) -> str:
    found = []
    for dtype in codegen.DTYPES:
        for name, launch in codegen.launches_of(dtype).items():
            compiled = launch.compiled()
            compiled._init_handles()
            found += [f"{name} {dtype}: {compiled.n_spills}"] if compiled.n_spills else []
    return "; ".join(found) or "none"


def partials(device: torch.device) -> str:
    gradients = Gradients(WORKLOADS["gpt2_124m"], "float32", device)
    batch = backend().TritonLayout(gradients.grads).bind(gradients.grads, None)
    norms = batch.norm(2.0, per_gradient=False)
    time = on_gpu(partial(batch.scale_, norms, Clip(2.0, EPS, math.inf, 1.0)), device)
    return f"{time:.1f} us of {norms.numel()}, with nothing to write"


def from_cache(device: torch.device) -> str:
    gradients = Gradients(WORKLOADS["resnet50"], "float32", device)
    (norm, _), (scale, _) = verb("norm", gradients), verb("scale", gradients)
    calls = (lambda: (norm(), scale()), norm, scale)
    both, *apart = (on_gpu(call, device, gradients.refill) for call in calls)
    return f"{both:.1f} us together, {sum(apart):.1f} us apart"


def clamped(device: torch.device) -> str:
    gradients = Gradients(WORKLOADS["gpt2_124m"], "float32", device)
    rule = tritonclip.ClipByValue(gradients.limit("value", clipped=True))
    clip = partial(tritonclip.clip_, gradients.parameters, rule)
    time = on_gpu(clip, device, gradients.refill)
    passes = time * 1e3 * timing.copy_gb_per_s(device) / gradients.n_bytes
    return f"{time:.1f} us, in which a copy moves them {passes:.2f} times; all from cache: 2"


def tiny(device: torch.device) -> str:
    gradients = Gradients(WORKLOADS["tiny_10000"], "float32", device)
    return ", ".join(f"{k} {on_gpu(verb(k, gradients)[0], device):.1f} us" for k in SWEPT)


def moved(device: torch.device) -> str:
    gradients, times = Gradients(WORKLOADS["resnet50"], "float32", device), []
    for _ in range(50):
        # While the old gradients are alive, the new ones lie elsewhere.
        kept = gradients.parameters
        gradients.allocate()
        clip = partial(tritonclip.clip_, gradients.parameters, 1.0)
        times.append(sample(Timed(clip), device)[0])
        del kept
    median, most = statistics.median(times[1:]), max(times[1:])
    return f"first {times[0]:.0f} us, then {median:.0f}, at most {most:.0f}"


def largest(device: torch.device) -> str:
    grad = torch.empty(LARGEST // 2, dtype=torch.bfloat16, device=device)
    batch, found = backend().TritonLayout([grad]).bind([grad], None), []
    for limit, passes in ((math.inf, 1), (1.0, 3)):
        clip = partial(batch.clip_, 2.0, EPS, limit, 1.0)
        time = on_gpu(clip, device, partial(grad.fill_, 1e-3))
        found.append(f"{time / 1e3:.2f} ms, {passes * LARGEST / (time * 1e3):,.0f} GB/s")
    return f"{'; '.join(found)}; a copy {timing.copy_gb_per_s(device):,.0f} GB/s"


def cold(device: torch.device) -> str:
    command = [sys.executable, "-c", COLD]
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
        given["env"] = os.environ | {"TRITON_CACHE_DIR": folder}
        started = [subprocess.Popen(command, **given) for _ in range(8)]
        most = max(float(one.communicate(timeout=60)[0]) for one in started)
        warm = float(subprocess.run(command, check=True, **given).stdout)
    return f"{most:.1f} s; alone, with the binaries on disk, {warm:.1f} s"


QUESTIONS: dict[str, Callable[[torch.device], str]] = {
    "Do launches of compiled kernels give the bits of Triton's JIT?": same_bits,
    "Does a norm differ from call to call?": repeats,
    "Which kernels spill registers with this Triton?": spills,
    "What does a sum of all partial norms in every program take?": partials,
    "What do norm and scale of ResNet-50 save by finding gradients in L2?": from_cache,
    "Does clamp find its second read of GPT-2 in cache?": clamped,
    "What do 10,000 tiny gradients take?": tiny,
    "What do 50 calls on gradients at new addresses take the host?": moved,
    "What does one bfloat16 gradient of 3.07 GB take, unclipped and clipped?": largest,
    "What does the first call take, which compiles, in 8 processes at once?": cold,
}


def ask(device: torch.device, end: float) -> Iterator[Row]:
    """All answers; a question that fails says how, and the others go on."""
    for question, asked in QUESTIONS.items():
        try:
            text = asked(device) if monotonic() < end else "no time was left"
        except Exception as error:  # Of a compiler or a driver, too.
            text = f"not answered: {type(error).__name__}: {error}"
        yield answer(question, text)


def report(rows: Sequence[Row]) -> str:
    """The plan beside a copy, the best setting of each kernel beside today's, and all answers."""
    lines = []
    if measured := [row for row in rows if row.ours]:
        lines.append(results.table(measured, shown=FIGURES))
    by_kernel = defaultdict(list)
    for row in rows:
        if row.benchmark == "sweep":
            by_kernel[f"{row.get('kernel')}, {row.get('dtype')}"].append(row)
    lines += [f"{kernel}: {best_of(own)}" for kernel, own in by_kernel.items()]
    answers = [row for row in rows if row.benchmark == "gpu"]
    return "\n".join([*lines, *(f"{row.get('question')} {row.get('answer')}" for row in answers)])


def best_of(rows: Sequence[Row]) -> str:
    """The fastest setting of a kernel, and today's, which comes first."""
    now, timed = rows[0], [row for row in rows if row.correct]
    if now.correct is False:
        return f"today's constants failed: {now.get('answer')}"
    best = min(timed, key=lambda row: float(row.get("device_us")))
    changed = [f"{n} {best.get(n):,}" for n in Setting._fields if best.get(n) != now.get(n)]
    figures = "{device_us:.1f} us, {gb_per_s:,.0f} GB/s".format_map
    return (
        f"today {figures(now.values)}; best of {len(timed)} {figures(best.values)} with "
        f"{', '.join(changed) or 'the same'}; a copy {now.get('copy_gb_per_s'):,.0f} GB/s"
    )

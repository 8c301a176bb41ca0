"""`python -m tritonclip run SCRIPT`: as Python runs it, clipped by tritonclip, with a report."""

import atexit
import re
import shutil
import signal
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import tritonclip
from helpers.workers import NEEDS_FORK, python
from tritonclip.commands import cli
from tritonclip.monitor.history import read

# What a script can see of how it was run; a worker imports the script by its name or path.
SIGHT = """
import atexit, multiprocessing, pickle, sys

class Thing:
    def __init__(self, size):
        self.size = size

def double(thing):
    return 2 * thing.size

@atexit.register
def end():
    if __name__ == "__main__":
        print("at the end", pickle.loads(pickle.dumps(Thing(3))).size, flush=True)

if __name__ == "__main__":
    print(__file__, __package__, __cached__, type(__loader__).__name__, __spec__ and __spec__.name)
    print(__doc__, sys.argv, sys.path[0], Thing.__module__)
    assert sys.modules["__main__"].Thing is Thing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [Thing(1), Thing(5)]), flush=True)
    sys.exit("that is all")
"""

# A loop that must not be edited.
TRAIN = """
import sys
import torch
from torch.nn.utils import clip_grad_norm_

def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    # In one piece, which the output of another process does not come between.
    sys.stdout.write(f"{[round(x, 5) for x in model.weight.flatten().tolist()]}\\n")
    if sys.argv[2:]:
        raise KeyError(sys.argv[2])

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with scripts."""
    (tmp_path / "sight.py").write_text(SIGHT)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys\nprint(__package__, sys.argv)")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, capfd):
    """Runs a script in this process, plain or by the command; what it printed until its end."""
    ends: list[Any] = []
    monkeypatch.setattr(atexit, "register", ends.append)
    for owner, name in ((BaseProcess, "start"), (subprocess.Popen, "__init__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments, plain=False, status=0):
        if plain:
            sys.argv[:] = [*map(str, arguments)]
            exec(Path(arguments[0]).read_text(), {"__name__": "__main__"})
        else:
            try:
                assert cli.main(["run", *map(str, arguments)]) == status
            finally:
                while ends:
                    ends.pop()()
        return capfd.readouterr()

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("target", [["./sight.py"], ["-m", "sight"]], ids=["script", "module"])
def test_a_script_sees_what_python_shows_it(folder, target):
    """Also `pickle`, a process that is spawned, functions at exit, and the status."""
    plain = python(*target, "--compare", "a b")
    done = python("-m", "tritonclip", "run", *target, "--compare", "a b")
    assert "at the end 3" in plain.stdout
    assert done.stdout == plain.stdout
    assert done.returncode == plain.returncode == 1
    assert plain.stderr in done.stderr


@pytest.mark.parametrize("target", ["./package", "package.zip", "/dev/stdin"])
def test_what_python_runs_beside_files_and_modules_is_run(folder, target):
    """A folder and an archive with a __main__, and a pipe."""
    if target == "/dev/stdin" and not Path(target).exists():
        pytest.skip("no such file on this system")
    text = (
        "import sys\nprint(__name__, __package__, __file__, __spec__ and __spec__.name)\n"
        "print(type(__loader__).__name__, sys.argv)\nimport helper; print(sys.path[0])\n"
    )
    (folder / "package" / "__main__.py").write_text(text)
    (folder / "package" / "helper.py").write_text("print(__file__)")
    shutil.make_archive("package", "zip", "package")
    found = [
        subprocess.run(
            [sys.executable, *words, target, "a"], input=text, capture_output=True, text=True
        )
        for words in ([], ["-m", "tritonclip", "run"])
    ]
    plain, done = found
    assert done.stdout == plain.stdout
    assert "__main__" in plain.stdout
    assert done.returncode == plain.returncode
    assert plain.stderr in done.stderr


@pytest.mark.parametrize(
    "text",
    ["def f():\n    raise KeyError('no such size')\nf()", "x = (", "raise KeyboardInterrupt"],
    ids=["error", "syntax", "interrupt"],
)
def test_an_error_is_shown_as_python_shows_it(folder, text):
    (folder / "fails.py").write_text(text)
    plain = python("fails.py")
    done = python("-m", "tritonclip", "run", "fails.py")
    report = "tritonclip run: no call of torch's functions that clip was seen\n"
    assert done.stderr == plain.stderr + report
    assert done.returncode == plain.returncode
    if "Interrupt" in text and sys.platform != "win32":
        assert done.returncode == -signal.SIGINT


def test_a_package_is_run_by_its_main(run):
    printed = run("-m", "package", "--flag")
    file = Path("package", "__main__.py").resolve()
    assert printed.out == f"package {[str(file), '--flag']}\n"


def test_a_script_is_clipped_by_tritonclip_and_trains_as_before(run):
    before = torch.nn.utils.clip_grad_norm_
    printed = run("train.py", "12")
    assert printed.out == run("train.py", 12, plain=True).out
    said = "tritonclip run: calls of torch's functions: 12 of clip_grad_norm_; all by tritonclip\n"
    assert printed.err == said
    assert torch.nn.utils.clip_grad_norm_ is before


def test_compare_leaves_the_training_as_it_is_and_says_whether_tritonclip_helps(run):
    printed = run("--compare", "train.py", "40")
    assert printed.out == run("train.py", 40, plain=True).out
    assert "\nclip_grad_norm_ of 2 gradients with 36 elements, 40 calls\n" in printed.err
    row = r"^  {}  +[\d.,]+ [um]s \([\d.,]+ [um]s to [\d.,]+ [um]s\), [\d.]+% of the time$"
    for name in ("torch", "tritonclip"):
        assert re.search(row.format(name), printed.err, re.MULTILINE)
    ratio = r"^  [\d.]+x; largest relative difference of the norms: [\de.+-]+$"
    assert re.search(ratio, printed.err, re.MULTILINE)
    assert "tritonclip" in printed.err.splitlines()[-1]


def test_a_script_that_fails_gets_the_report_so_far(run, capfd):
    with pytest.raises(KeyError, match="broken"):
        run("train.py", "5", "broken")
    assert "calls of torch's functions: 5 of clip_grad_norm_" in capfd.readouterr().err


def test_a_script_that_does_not_clip_is_told_what_else_may(run, folder):
    (folder / "other.py").write_text("print('no clipping')")
    printed = run("other.py")
    assert printed.out == "no clipping\n"
    for word in ("no call was replaced", "DeepSpeed", "FSDP1", "torchrun", "torch.compile"):
        assert word in printed.err


def test_a_call_that_both_refuse_is_not_counted_as_tritonclips(run, folder, capfd):
    (folder / "wrong.py").write_text("import torch\ntorch.nn.utils.clip_grad_norm_(1, 1.0)")
    with pytest.raises(TypeError):
        run("wrong.py")
    assert "torch served 1 of these 1 calls, which tritonclip refuses:" in capfd.readouterr().err


def test_calls_that_torch_serves_are_counted_with_the_reason(run, folder):
    (folder / "negative.py").write_text(
        "import torch\nweight = torch.nn.Parameter(torch.ones(2))\nweight.grad = torch.ones(2)\n"
        "for _ in range(2):\n    torch.nn.utils.clip_grad_norm_([weight], -1.0)"
    )
    with pytest.warns(tritonclip.ClippingWarning, match="torch's own function serves"):
        printed = run("negative.py")
    assert "torch served 2 of these 2 calls, which tritonclip refuses:\n  2: clip_" in printed.err


def test_record_writes_a_history_into_a_new_file(run, folder):
    printed = run("--record", "norms.csv", "train.py", 24)
    assert "\nnorms are in norms.csv: python -m tritonclip suggest norms.csv\n" in printed.err
    history = read(folder / "norms.csv")
    assert len(history) == 24
    assert set(history.limits.tolist()) == {0.1}
    said = run("--record", "norms.csv", "train.py", 24, status=1).err
    assert "norms.csv exists; expected the name of a new file" in said
    assert len(read(folder / "norms.csv")) == 24


LOSSES = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
for step in range(5):
    for part in (1.0, step):
        (weight * part).sum().backward()
    torch.nn.utils.clip_grad_norm_(weight, 1.0)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
"""


@pytest.mark.parametrize("options", [[], ["--no-loss"]], ids=["", "none"])
def test_record_writes_the_losses_of_a_script_as_it_is(run, folder, options):
    (folder / "train.py").write_text(LOSSES)
    backward = torch.autograd.backward
    run("--record", "norms.csv", *options, "train.py")
    assert torch.autograd.backward is backward
    history = read(folder / "norms.csv")
    if options:
        assert not history.has_losses
    else:
        assert history.losses.tolist() == [2.0 * (1 + n // 2) for n in range(10)]


def test_record_says_that_no_norm_came_and_keeps_the_exit_status(run, folder, capfd):
    (folder / "other.py").write_text("import sys\nsys.exit(3)")
    with pytest.raises(SystemExit) as ended:
        run("--record", "norms.csv", "other.py")
    assert ended.value.code == 3
    assert capfd.readouterr().err.splitlines()[-1] == "no norm was recorded"
    assert not (folder / "norms.csv").exists()


def test_record_names_no_file_that_could_not_be_written(folder):
    away = "    import shutil; shutil.rmtree('runs')\n"
    (folder / "away.py").write_text(TRAIN + away)
    (folder / "runs").mkdir()
    done = python("-m", "tritonclip", "run", "--record", "runs/norms.csv", "away.py", "3")
    assert done.returncode == 0, done.stderr
    assert "rows for" in done.stderr
    assert "are lost" in done.stderr
    assert "norms are in" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.py"], "expected a script, got nothing.py; there is no such file in"),
        (["-m", "nothing"], "expected a module that can be run, got nothing"),
        (["-m", "package.nothing"], "expected a module that can be run, got package.nothing"),
        (["-m", "train.py"], "got the path train.py; leave out -m"),
        (["--record", "norms.txt", "train.py"], "norms.txt"),
    ],
    ids=["script", "module", "submodule", "path", "record"],
)
def test_a_wrong_target_ends_with_a_message(run, arguments, said):
    printed = run(*arguments, status=1)
    assert not printed.out
    assert printed.err.startswith("Error: ")
    assert said in printed.err


def test_options_after_the_script_go_to_it_and_it_is_said(run, folder):
    (folder / "other.py").write_text("print('trained')")
    printed = run("other.py", "3", "--record=norms.csv")
    assert printed.out == "trained\n"
    first = printed.err.splitlines()[0]
    assert "--record after other.py went to the script" in first
    assert first.endswith("python -m tritonclip run --record ... other.py")


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [(["args.py", "--", "--x"], "--,--x"), (["args.py", "a", "--", "b"], "a,--,b")],
)
def test_two_dashes_of_the_script_stay(run, folder, arguments, seen):
    (folder / "args.py").write_text("import sys; print(','.join(sys.argv[1:]))")
    assert run(*arguments).out == f"{seen}\n"


def test_threads_train_on_after_the_main_file(folder):
    """Their calls are clipped by tritonclip, counted, and recorded, wherever the script went."""
    train = TRAIN.replace(
        "    main()\n",
        "    import os, threading, time\n"
        "    os.chdir('/')\n"
        "    threading.Thread(target=lambda: (time.sleep(0.5), main())).start()\n",
    )
    (folder / "threads.py").write_text(train)
    done = python("-m", "tritonclip", "run", "--record", "norms.csv", "threads.py", "7")
    assert done.returncode == 0, done.stderr
    assert "7 of clip_grad_norm_; all by tritonclip" in done.stderr
    assert len(read(folder / "norms.csv")) == 7


@pytest.mark.parametrize(
    "end",
    [
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = sys.stderr = sys.exit = None; os.environ.clear(); os.chdir('/')",
        "os.close(2); sys.exit(5)",
        "import builtins; builtins.print = None; os._exit(3)",
    ],
)
def test_what_a_script_changes_leaves_its_exit_status(folder, end):
    (folder / "ends.py").write_text(f"{TRAIN}    import os\n    {end}\n")
    plain = python("ends.py", "3")
    assert python("-m", "tritonclip", "run", "ends.py", "3").returncode == plain.returncode


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM ends a program there at once")
def test_rows_are_written_at_sigterm(folder):
    train = f"{TRAIN}    import os, signal\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    (folder / "killed.py").write_text(train)
    done = python("-m", "tritonclip", "run", "--record", "norms.csv", "killed.py", "90")
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert len(read(folder / "norms.csv")) == 90


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["torchrun", "--nproc-per-node", "2", "train.py", "3"],
            "write torchrun --nproc-per-node 2 -m tritonclip run train.py 3",
        ),
        (
            ["-m", "torch.distributed.run", "--standalone", "train.py"],
            "write python -m torch.distributed.run --standalone -m tritonclip run train.py",
        ),
        (
            ["accelerate", "launch", "--cpu", "-m", "package"],
            "write accelerate launch --cpu -m tritonclip run -m package",
        ),
        (["python", "train.py"], "write python -m tritonclip run train.py"),
        (["notes.ipynb"], "in its first cell write: %load_ext tritonclip"),
        (["train.sh"], "in the shell script write python -m tritonclip run train.py"),
    ],
)
def test_what_is_no_script_gets_the_line_to_write(run, arguments, line):
    printed = run(*arguments, status=1)
    assert not printed.out
    assert line in printed.err


def test_processes_that_the_script_starts_are_said_to_have_no_patch(folder):
    train = TRAIN.replace(
        "    main()\n",
        "    import multiprocessing, subprocess\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=main, name='trains')\n"
        "    worker.start()\n"
        "    worker.join()\n"
        "    subprocess.run([sys.executable, 'train.py', '1'], check=True)\n",
    )
    (folder / "train.py").write_text(TRAIN)
    (folder / "starts.py").write_text(train)
    done = python("-m", "tritonclip", "run", "starts.py", "2")
    assert done.returncode == 0, done.stderr
    assert "not patched: processes that the script started (trains)" in done.stderr
    assert "tritonclip.patch_torch()" in done.stderr


def test_where_no_call_was_seen_processes_that_the_script_started_are_named_first(run, folder):
    """A kernel of a notebook here, which Jupyter starts as this script does."""
    (folder / "starts.py").write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', '', 'ipykernel_launcher', '-f', 'x'], check=True)"
    )
    first, second, *_ = run("starts.py").err.splitlines()
    assert first.endswith("was seen, so that no call was replaced.")
    assert "(the kernel" in second
    assert "in the first cell of a notebook %load_ext tritonclip" in second


@NEEDS_FORK
def test_where_only_forks_clip_the_report_says_that_they_are_patched(folder):
    train = TRAIN.replace(
        "    main()\n",
        "    import multiprocessing\n"
        "    worker = multiprocessing.get_context('fork').Process(target=main, name='trains')\n"
        "    worker.start()\n"
        "    worker.join()\n",
    )
    (folder / "forks.py").write_text(train)
    done = python("-m", "tritonclip", "run", "forks.py", "2")
    assert done.returncode == 0, done.stderr
    assert "not counted: calls in forks of the script (trains)" in done.stderr.splitlines()[1]


def test_processes_of_torchrun_have_a_patch_each_and_the_first_one_reports(folder):
    """Two processes with gloo, which take turns alike: some ten seconds on a busy machine."""
    train = TRAIN.replace("def main():", "def main():\n    dist.init_process_group('gloo')")
    train = train.replace("import sys", "import sys\nimport torch.distributed as dist")
    train = train.replace("torch.nn.Linear(8, 4)", "DDP(torch.nn.Linear(8, 4))")
    train = train.replace("model.weight", "model.module.weight")
    ddp = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    (folder / "ddp.py").write_text(ddp + train + "    dist.destroy_process_group()\n")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = python(
        *launch, "-m", "tritonclip", "run", "--compare", "ddp.py", "40", OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    # Replicas that were clipped alike.
    assert first == second
    assert done.stderr.count("40 of clip_grad_norm_") == 1


LISTS_OF_SOME = """
import gc
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_, get_total_norm

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
whole = init_device_mesh("cpu", (size,))
half = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))["b"]

def sharded(mesh):
    made = torch.nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    made.grad = distribute_tensor(torch.full((8, 4), 3.0), mesh, [Shard(0)])
    return made

first, second = sharded(whole), sharded(half)
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 4))
torch.manual_seed(rank)
probe = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    if rank < 2 and step % 3:
        clip_grad_norm_([second], 1.0)
    clip_grad_norm_([first], 1.0)
    if rank == 0:
        # Of the same size as the model, and alone.
        probe(torch.randn(2, 8)).square().sum().backward()
        clip_grad_norm_(probe.parameters(), 0.1)
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    if rank == 0 and step % 2:
        get_total_norm([p.grad for p in model.parameters()])
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
weights = [torch.zeros(4, 8) for _ in range(size)]
dist.all_gather(weights, model.module.weight.detach())
if rank == 0:
    print(max((weight - weights[0]).abs().max().item() for weight in weights))
# Python at its end would race with threads of gloo for groups that these still hold, and abort.
del first, second, model, optimizer
gc.collect()
dist.barrier()
dist.destroy_process_group()
"""


def test_turns_do_not_depend_on_lists_that_other_processes_do_not_have(folder):
    """Four processes: a second list on half of the mesh would hang, and a probe would drift."""
    (folder / "some.py").write_text(LISTS_OF_SOME)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    done = python(*launch, "-m", "tritonclip", "run", "--compare", "some.py", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0.0\n"
    assert "too few calls to compare; expected" not in done.stderr


@pytest.mark.parametrize(
    "options",
    [[], ["--compare"], ["--record", "a.csv"], ["-m"]],
    ids=["none", "compare", "record", "-m"],
)
def test_run_without_a_script_asks_for_a_script_or_a_module(run, options):
    first, *_, last = run(*options, status=2).err.splitlines()
    assert first.startswith("usage: python -m tritonclip run ")
    assert last.endswith("the following arguments are required: SCRIPT or -m MODULE")


def test_an_unknown_option_before_the_script_ends_with_status_2(run):
    first, *_, last = run("--bogus", "x.py", status=2).err.splitlines()
    assert first.startswith("usage: python -m tritonclip run ")
    assert last.endswith("unrecognized arguments: --bogus")

"""`patch_torch`: who calls tritonclip, what torch still serves, and that all is put back."""

import contextlib
import copy
import functools
import inspect
import math
import pickle
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor

import tritonclip
from helpers.cases import grad_of, parameters
from helpers.workers import NEEDS_FORK, run_in_fork
from tritonclip.integrations import patching
from tritonclip.integrations.patching import Losses, TorchPatch, original_of
from tritonclip.monitor.history import read

NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
TORCHS = {name: getattr(torch.nn.utils, name) for name in NAMES}
CODES = {function: function.__code__ for function in TORCHS.values()}
# As a module that was imported before the patch holds it.
CLIP = torch.nn.utils.clip_grad_norm_


def served_by_torch():
    said = "torch's own function serves this call"
    return pytest.warns(tritonclip.ClippingWarning, match=said)


class Gradient(Tensor):
    """A subclass, which tritonclip refuses and torch clips."""


def is_patched() -> bool:
    """Whether torch's function runs this library's code: torch's overflows in float16."""
    (param,) = parameters([torch.full((4,), 6e4, dtype=torch.float16)])
    return math.isfinite(torch.nn.utils.clip_grad_norm_([param], 1.0))


def assert_torchs_own() -> None:
    assert not is_patched()
    for function in TORCHS.values():
        assert function.__code__ is CODES[function]


def clip_by(function: Callable[..., object]) -> bool:
    """Whether a function that clips the parameters of a call by 1.0 is tritonclip's."""
    (param,) = parameters([torch.full((4,), 6e4, dtype=torch.float16)])
    function([param])
    return bool(grad_of(param).any())


def by_default(params: list[Tensor], clip: Callable[..., object] = torch.nn.utils.clip_grad_norm_):
    clip(params, 1.0)


KEPT = {
    "by its name": lambda params: CLIP(params, 1.0),
    "by a partial": functools.partial(CLIP, max_norm=1.0),
    "as a default": by_default,
    "in an object": types.SimpleNamespace(clip=functools.partial(CLIP, max_norm=1.0)).clip,
    "by torch's deprecated name": lambda params: torch.nn.utils.clip_grad_norm(params, 1.0),
    "by torch's private names": lambda params: torch.nn.utils.clip_grad._clip_grads_with_norm_(
        params, 1.0, torch.nn.utils.clip_grad._get_total_norm([params[0].grad])
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.clip_grad_norm` is now deprecated")
@pytest.mark.parametrize("clip", KEPT.values(), ids=KEPT)
def test_whoever_kept_a_function_gets_ours_and_then_torchs_again(clip):
    with tritonclip.patch_torch():
        assert clip_by(clip)
        kept = torch.nn.utils.clip_grad_norm_
    assert not clip_by(clip)
    assert not clip_by(lambda params: kept(params, 1.0))
    assert_torchs_own()


@pytest.mark.parametrize("name", NAMES)
def test_functions_stay_the_same_objects(name):
    function = TORCHS[name]
    signature = inspect.signature(function)
    with tritonclip.patch_torch() as patch:
        assert getattr(torch.nn.utils, name) is function
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy([function]) == [function]
        assert inspect.signature(function) == signature
        assert name in str(patch)


def test_a_mock_that_outlives_the_patch_leaves_torchs_function():
    mocked = mock.patch("torch.nn.utils.clip_grad_norm_")
    with tritonclip.patch_torch():
        mocked.start()
        assert torch.nn.utils.clip_grad_norm_ is not CLIP
    mocked.stop()
    assert torch.nn.utils.clip_grad_norm_ is CLIP
    assert_torchs_own()


def test_modules_that_cannot_be_loaded_are_not_touched(monkeypatch):
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> object:
            raise ImportError(name)

    monkeypatch.setitem(sys.modules, "a_lazy_module", Lazy("a_lazy_module"))
    with tritonclip.patch_torch():
        assert is_patched()
    assert_torchs_own()


def test_a_function_that_was_replaced_before_stays_and_a_warning_says_so():
    code = """
import torch, warnings
from pathlib import Path
from typing import Any
from unittest import mock
own = torch.nn.utils.clip_grad.clip_grad_value_.__code__
with mock.patch("torch.nn.utils.clip_grad.clip_grad_norm_") as mocked:
    import tritonclip
    with warnings.catch_warnings(record=True) as caught:
        patch = tritonclip.patch_torch()
    print(len(caught), caught[0].message)
    print(torch.nn.utils.clip_grad.clip_grad_norm_ is mocked)
    print(torch.nn.utils.clip_grad.clip_grad_value_.__code__ is own)
patch.remove()
print(torch.nn.utils.clip_grad.clip_grad_value_.__code__ is own)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, *others = done.stdout.splitlines()
    assert "['clip_grad_norm_']" in said
    assert others == ["True", "False", "True"]


def test_one_call_removes_all_patches():
    """As of a cell of a notebook that was run twice."""
    first, second = tritonclip.patch_torch(), tritonclip.patch_torch()
    second.remove()
    assert_torchs_own()
    first.remove()
    assert "removed" in str(first)
    assert "removed" in str(second)


def test_ipython_loads_and_unloads_the_patch():
    shell = InteractiveShell.instance()
    for _ in range(2):
        shell.run_line_magic("load_ext", "tritonclip")
        shell.run_line_magic("reload_ext", "tritonclip")
        assert is_patched()
        shell.run_line_magic("unload_ext", "tritonclip")
        assert_torchs_own()


def test_the_end_of_a_block_takes_its_own_patch_away():
    with tritonclip.patch_torch() as outer:
        with tritonclip.patch_torch():
            pass
        assert is_patched()
        assert "active" in str(outer)
    assert_torchs_own()


def test_blocks_of_one_patch_may_be_nested():
    """Also where the inner one ends with an error."""
    patch = tritonclip.patch_torch()
    with patch:
        with contextlib.suppress(KeyError), patch, patch:
            raise KeyError
        assert is_patched()
    assert_torchs_own()
    with patch:
        patch.remove()
        assert_torchs_own()
        with patch:
            assert is_patched()
    assert_torchs_own()


def test_a_stack_may_end_a_patch_that_it_did_not_begin():
    with contextlib.ExitStack() as stack:
        stack.push(tritonclip.patch_torch())
        assert is_patched()
    assert_torchs_own()


def test_code_that_was_kept_while_patched_is_torchs_again():
    with tritonclip.patch_torch():
        kept = types.FunctionType(CLIP.__code__, CLIP.__globals__, closure=CLIP.__closure__)
        assert clip_by(lambda params: kept(params, 1.0))
    assert not clip_by(lambda params: kept(params, 1.0))


def test_a_program_may_empty_the_modules_that_are_imported(monkeypatch):
    with tritonclip.patch_torch():
        for name in [name for name in sys.modules if name.startswith("tritonclip")]:
            monkeypatch.delitem(sys.modules, name)
        assert is_patched()
        monkeypatch.undo()
    assert_torchs_own()


def test_a_call_during_which_the_patch_ends_is_served():
    def removing(params):
        tritonclip.patch_torch().remove()
        yield from params

    with tritonclip.patch_torch():
        params = parameters([torch.tensor([3.0, 4.0])])
        assert torch.nn.utils.clip_grad_norm_(removing(params), 1.0) == 5.0
        assert_torchs_own()


def test_arguments_that_torch_does_not_have_are_refused_as_by_torch():
    for context in (contextlib.nullcontext, tritonclip.patch_torch):
        with (
            context(),
            pytest.raises(TypeError, match="unexpected keyword argument 'process_group'"),
        ):
            torch.nn.utils.clip_grad_norm_([], 1.0, process_group=None)  # type: ignore[call-arg]


def test_functions_that_were_replaced_are_named():
    """By another library, or a reload of the module, after tritonclip was imported."""
    code = """
import importlib, torch, tritonclip, warnings
from unittest import mock
def said():
    with warnings.catch_warnings(record=True) as caught:
        tritonclip.patch_torch().remove()
    return [str(one.message) for one in caught]
print(said())
with mock.patch("torch.nn.utils.clip_grad_norm_"):
    print(said())
importlib.reload(torch.nn.utils.clip_grad)
print(said())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    nothing, mocked, reloaded = done.stdout.replace("\\'", "'").splitlines()
    assert nothing == "[]"
    assert "other functions than torch's for ['clip_grad_norm_']" in mocked
    assert "other functions than torch's for ['clip_grad_norm_', 'clip_grad_value_'" in reloaded


def test_an_error_while_patching_leaves_torch_as_it_was(monkeypatch):
    exchange = patching._exchange

    def failing(*, active: bool) -> None:
        exchange(active=active)
        if active:
            raise KeyboardInterrupt

    monkeypatch.setattr(patching, "_exchange", failing)
    with pytest.raises(KeyboardInterrupt):
        tritonclip.patch_torch()
    assert not patching._patches
    assert_torchs_own()


def test_an_error_in_the_block_puts_torchs_functions_back():
    with pytest.raises(KeyError), tritonclip.patch_torch():
        raise KeyError
    assert_torchs_own()


def test_patched_functions_are_tritonclips():
    """Squares of float16 elements overflow in torch's norm."""
    half = torch.full((4,), 6e4, dtype=torch.float16)
    (param,) = parameters([half.clone()])
    with tritonclip.patch_torch():
        norm = torch.nn.utils.clip_grad_norm_([param], 1.0)
        total = torch.nn.utils.get_total_norm([half.float()])
        torch.nn.utils.clip_grad_value_([param], 0.25)
    assert norm.item() == pytest.approx(math.hypot(*half.tolist()), rel=1e-6)
    assert total.item() == pytest.approx(math.hypot(*half.tolist()), rel=1e-6)
    assert grad_of(param).abs().max() <= 0.25


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({"max_norm": -1.0}, [-0.6, -0.8], id="negative limit"),
        pytest.param({"max_norm": True}, [0.6, 0.8], id="a truth value"),
    ],
)
def test_torch_serves_what_tritonclip_refuses_and_says_so_once(given, expected):
    first, second, third = (parameters([torch.tensor([3.0, 4.0])]) for _ in range(3))
    norm = torch.nn.utils.clip_grad_norm_(first, **given)
    with tritonclip.patch_torch() as patch:
        with served_by_torch():
            assert torch.equal(torch.nn.utils.clip_grad_norm_(second, **given), norm)
        # Without another warning, which would be an error here.
        torch.nn.utils.clip_grad_norm_(third, **given)
    assert torch.equal(grad_of(second[0]), grad_of(first[0]))
    torch.testing.assert_close(grad_of(third[0]), torch.tensor(expected), rtol=1e-5, atol=0)
    assert patch.served_by_torch.total() == 2
    assert "torch served 2 calls: clip_grad_norm_: " in str(patch)


def test_torch_serves_gradients_of_subclasses():
    (weight,) = parameters([torch.tensor([3.0, 4.0]).as_subclass(Gradient)])
    with tritonclip.patch_torch(), served_by_torch():
        assert float(torch.nn.utils.clip_grad_norm_([weight], 1.0)) == 5.0


def test_where_both_refuse_the_error_is_torchs():
    with pytest.raises(TypeError) as expected:
        torch.nn.utils.clip_grad_norm_(1, 1.0)  # type: ignore[arg-type]
    with tritonclip.patch_torch() as patch, pytest.raises(TypeError) as found:
        torch.nn.utils.clip_grad_norm_(1, 1.0)  # type: ignore[arg-type]
    assert str(found.value) == str(expected.value)
    assert found.value.__context__ is None
    assert "torch served 1 calls: clip_grad_norm_: " in str(patch)


def test_the_error_for_a_norm_that_is_not_finite_names_the_gradients():
    (param,) = parameters([torch.tensor([math.nan, 4.0])])
    with tritonclip.patch_torch(), pytest.raises(RuntimeError, match=r"parameters\[0\]"):
        torch.nn.utils.clip_grad_norm_([param], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_may_be_named_as_torchs_are(name):
    """Also the first, which may be an iterator."""
    given: dict[str, dict[str, object]] = {
        "clip_grad_norm_": {"max_norm": 1.0},
        "clip_grad_value_": {"clip_value": 1.0},
        "clip_grads_with_norm_": {"max_norm": 1.0, "total_norm": torch.tensor(5.0)},
        "get_total_norm": {},
    }
    first, second = (parameters([torch.tensor([3.0, 4.0])]) for _ in range(2))

    def clip(params):
        if name == "get_total_norm":
            return torch.nn.utils.get_total_norm(tensors=[grad_of(p) for p in params])
        return getattr(torch.nn.utils, name)(parameters=iter(params), **given[name])

    expected = clip(first)
    with tritonclip.patch_torch() as patch:
        found = clip(second)
    assert not patch.served_by_torch
    if expected is not None:
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad_of(second[0]), grad_of(first[0]))


def test_a_limit_that_has_a_graph_gives_no_warning():
    """Torch's function gives none; a warning would be an error here."""
    params = parameters([torch.tensor([3.0, 4.0])])
    limit: Any = torch.tensor(1.0, requires_grad=True)
    with tritonclip.patch_torch() as patch:
        assert torch.nn.utils.clip_grad_norm_(params, limit).item() == 5.0
    assert not patch.served_by_torch


def test_an_iterator_is_read_once_for_both_functions():
    params = parameters([torch.tensor([3.0]), torch.tensor([4.0])])
    with tritonclip.patch_torch(), served_by_torch():
        norm = torch.nn.utils.clip_grad_norm_(iter(params), -5.0)
    assert norm.item() == 5.0


def test_a_recorder_takes_each_norm_and_its_limit_once(tmp_path):
    """Also by two calls, as torchtitan clips: one measures, the other one scales."""
    path = tmp_path / "norms.csv"
    with tritonclip.record(path) as recorder, tritonclip.patch_torch(recorder=recorder):
        for size in (5.0, 0.5):
            params = parameters([torch.tensor([size])])
            torch.nn.utils.clip_grad_norm_(params, max_norm=1.0)
            torch.nn.utils.get_total_norm([size * torch.ones(1)])
        params = parameters([torch.tensor([3.0, 4.0])])
        norm = torch.nn.utils.get_total_norm([grad_of(p) for p in params])
        torch.nn.utils.clip_grads_with_norm_(params, 1.0, total_norm=norm)
    history = read(path)
    assert history.norms.tolist() == [5.0, 0.5, 5.0]
    assert history.limits.tolist() == [1.0, 1.0, 1.0]


def test_two_patches_with_one_recorder_record_each_call_once(tmp_path):
    """As of a cell of a notebook that is run twice."""
    path = tmp_path / "norms.csv"
    with tritonclip.record(path) as recorder, tritonclip.patch_torch(recorder=recorder):
        with tritonclip.patch_torch(recorder=recorder):
            torch.nn.utils.clip_grad_norm_(parameters([torch.tensor([3.0, 4.0])]), 1.0)
        torch.nn.utils.clip_grad_norm_(parameters([torch.tensor([3.0])]), 1.0)
    assert read(path).norms.tolist() == [5.0, 3.0]


def another_run(path: Path) -> None:
    path.write_text("step,norm\n1,1.0\n")


def no_folder(path: Path) -> None:
    path.parent.rmdir()


TROUBLES: dict[str, Callable[..., Any]] = {
    "another run's file": lambda path, _: another_run(path),
    "no folder": lambda path, _: no_folder(path),
    "closed": lambda _, recorder: recorder.close(),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_recorder_in_trouble_is_dropped_with_one_warning(tmp_path, trouble):
    path = tmp_path / "runs" / "norms.csv"
    path.parent.mkdir()
    recorder = tritonclip.record(path, every=1)
    TROUBLES[trouble](path, recorder)
    params = parameters([torch.tensor([3.0, 4.0])])
    with tritonclip.patch_torch(recorder=recorder) as patch:
        with pytest.warns(tritonclip.ClippingWarning, match="records no further call"):
            assert torch.nn.utils.clip_grad_norm_(params, 1.0) == 5.0
        # Without another warning, which would be an error here.
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    assert patch.recorder is None
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.parent.mkdir(exist_ok=True)


def test_a_norm_that_a_recorder_cannot_take_is_a_warning(tmp_path):
    path = tmp_path / "norms.csv"
    (known,) = parameters([torch.tensor([3.0, 4.0])])
    with tritonclip.record(path) as recorder, tritonclip.patch_torch(recorder=recorder):
        torch.nn.utils.clip_grad_norm_([known], 1.0)
        abstract = torch.nn.Parameter(torch.zeros(2, device="meta"))
        abstract.grad = torch.zeros(2, device="meta")
        with pytest.warns(tritonclip.ClippingWarning, match="1 steps> keeps these steps"):
            assert torch.nn.utils.clip_grad_norm_([abstract], 1.0).is_meta
    assert read(path).norms.tolist() == [5.0]


@NEEDS_FORK
def test_a_fork_clips_on_without_the_recorder(tmp_path):
    path = tmp_path / "norms.csv"
    params = parameters([torch.tensor([3.0, 4.0])])

    def work() -> None:
        with pytest.warns(tritonclip.ClippingWarning, match="from a fork"):
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        torch.nn.utils.clip_grad_norm_(params, 1.0)

    with tritonclip.record(path) as recorder, tritonclip.patch_torch(recorder=recorder):
        run_in_fork(work)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    assert read(path).norms.tolist() == [5.0]


def test_a_recorder_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="recorder must be a Recorder or None, got str; make one"):
        tritonclip.patch_torch(recorder="norms.csv")  # type: ignore[arg-type]
    assert_torchs_own()


@contextlib.contextmanager
def watched():
    """The losses on which the block calls `backward`."""
    losses = Losses()
    end = losses.watch()
    yield losses
    end()


@pytest.fixture
def losses():
    with watched() as losses:
        yield losses


def loss_of(weight: Tensor, value: float) -> Tensor:
    """A loss of this value, of which the gradient is known."""
    return weight.sum() * 0 + value


SCALED = torch.amp.GradScaler("cpu", init_scale=1024.0)
BACKWARD: dict[str, tuple[Callable[[Tensor, Tensor], object], float | None]] = {
    "one": (lambda a, b: a.backward(), 2.0),
    "micro-batches": (lambda a, b: [(x / 2).backward() for x in (a, b)], 2.5),
    "many": (lambda a, b: [a.backward(retain_graph=True) for _ in range(256)], 512.0),
    "half precision": (lambda a, b: a.bfloat16().backward(), 2.0),
    "several at once": (lambda a, b: torch.autograd.backward([a, b]), 5.0),
    "gradients given": (lambda a, b: a.backward(torch.tensor(0.5)), None),
    "no scalar": (lambda a, b: a.expand(2).backward(torch.ones(2)), None),
    "retained": (lambda a, b: [a.backward(retain_graph=True), b.backward()], 5.0),
    "subclass": (lambda a, b: a.as_subclass(Gradient).backward(), None),
    "iterator": (lambda a, b: torch.autograd.backward(cast("Any", iter([a, b]))), None),
    "scaled": (lambda a, b: SCALED.scale(a).backward(), 2.0),
    "both scaled first": (lambda a, b: [x.backward() for x in [*map(SCALED.scale, (a, b))]], 5.0),
    "scaled, divided": (lambda a, b: (SCALED.scale(a) / 2).backward(), None),
    "scaler that is off": (lambda a, b: torch.amp.GradScaler(enabled=False).scale(a).backward(), 2),
}


@pytest.mark.parametrize(("backward", "total"), BACKWARD.values(), ids=BACKWARD)
def test_losses_are_those_on_which_a_script_calls_backward(losses, request, backward, total):
    weight = torch.nn.Parameter(torch.ones(3))
    backward(loss_of(weight, 2.0), loss_of(weight, 3.0))
    assert losses.total() == total
    assert weight.grad is not None
    # Of another list, which is clipped after the same backward pass.
    assert losses.total() == total
    # A loss that no scaler scaled is left out where there is one.
    loss_of(weight, 7.0).backward()
    assert losses.total() == (None if "scaled" in request.node.callspec.id else 7.0)


def test_a_loss_is_found_while_another_thread_scales_one(losses, monkeypatch):
    weight = torch.nn.Parameter(torch.ones(3))

    class Found(weakref.ref[Tensor]):
        """A reference that is read while the other thread runs."""

        def __call__(self) -> Tensor | None:
            SCALED.scale(loss_of(weight, 3.0))
            return super().__call__()

    monkeypatch.setattr(weakref, "ref", Found)
    SCALED.scale(loss_of(weight, 4.0)).backward()
    assert losses.total() == 4.0


def test_losses_of_threads_are_their_own(losses):
    def train(value: float) -> object:
        loss_of(torch.nn.Parameter(torch.ones(3)), value).backward()
        return losses.total()

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(train, (1.0, 2.0))] == [1.0, 2.0]
    assert losses.total() is None


def test_losses_keep_no_graph_and_no_tensor_of_the_script(losses, monkeypatch):
    """Also where a device has them, which nothing waits for."""
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda _: False))
    weight = torch.nn.Parameter(torch.ones(3))
    hidden = weight * 2
    alive = weakref.ref(hidden)
    loss = hidden.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    del hidden, loss
    assert alive() is None
    total = losses.total()
    assert isinstance(total, Tensor)
    assert not total.requires_grad
    assert total == 24.0


def test_a_loss_that_cannot_be_read_is_left_out_with_one_warning(losses, monkeypatch):
    weight = torch.nn.Parameter(torch.ones(3))
    monkeypatch.setattr(Tensor, "item", mock.Mock(side_effect=RuntimeError("overwritten")))

    def train() -> None:
        for _ in range(2):
            loss_of(weight, 1.0).backward()

    with pytest.warns(tritonclip.ClippingWarning, match="a loss is not recorded") as warned:
        train()
    assert losses.total() is None
    assert len(warned) == 1


def test_losses_leave_errors_as_they_are(losses):
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        torch.nn.Parameter(torch.ones(3)).mul(1).backward()
    assert losses.total() is None


def test_losses_break_no_graph_of_a_compiled_step():
    weight = torch.nn.Parameter(torch.ones(3))
    counters = torch._dynamo.utils.counters

    def step(x: Tensor) -> Tensor:
        loss = (weight * x).sum()
        loss.backward()
        return x * 2

    breaks = []
    for watch in (contextlib.nullcontext, watched):
        torch._dynamo.reset()
        counters.clear()
        with watch() as losses:
            assert torch.compile(step, backend="eager")(torch.ones(3)).sum() == 6.0
        breaks.append((dict(counters["graph_break"]), counters["stats"]["unique_graphs"]))
    assert losses is not None
    assert losses.total() == 3.0
    assert breaks[0] == breaks[1]


def test_a_wrapper_beside_a_patched_call_warns_of_a_second_clip():
    """The likeliest mistake: a trainer that clips, and a wrapped optimizer in it."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = tritonclip.ClippedOptimizer(torch.optim.SGD([weight], lr=0.1), 1.0)

    def clip_twice(norm: float) -> None:
        weight.grad = torch.full((4,), norm)
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()

    with tritonclip.patch_torch():
        for step in range(9):
            clip_twice(2.0 + step)
        with pytest.warns(tritonclip.ClippingWarning, match="clips to the same limit"):
            clip_twice(11.0)
        clip_twice(12.0)
    optimizer.stats.summary()


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("given", [{"norm_type": 0.5}, {"max_norm": -1.0}, {}], ids=str)
def test_a_compiled_call_is_torchs_with_the_patch_and_without(fullgraph, given):
    """Compiled before, with and after the patch; a graph that is made stays."""
    torch._dynamo.reset()
    found = []

    @torch.compile(backend="eager", fullgraph=fullgraph)
    def clip(param):
        norm = torch.nn.utils.get_total_norm([param.grad])
        torch.nn.utils.clip_grad_norm_([param], **{"max_norm": 1.0, **given})
        return norm

    def run():
        (param,) = parameters([torch.tensor([3.0, 4.0])])
        found.append((clip(param), grad_of(param)))

    run()
    with tritonclip.patch_torch():
        run()
        torch._dynamo.reset()
        run()
    run()
    for norm, grad in found:
        assert torch.equal(norm, found[0][0])
        assert torch.equal(grad, found[0][1])


def test_torchs_functions_stay_reachable_and_call_each_other():
    calls = []

    def observe(call):
        calls.append(call.name)
        return call.original, None

    params = parameters([torch.tensor([3.0, 4.0])])
    with TorchPatch(None, observe):
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        original_of(torch.nn.utils.clip_grad_norm_)(params, 1.0)
    assert calls == ["clip_grad_norm_"]
    assert original_of(len) is len


def test_threads_patch_and_clip_at_once():
    def work(_):
        for _ in range(5):
            with tritonclip.patch_torch():
                params = parameters([torch.tensor([3.0, 4.0])])
                assert torch.nn.utils.clip_grad_norm_(params, 1.0).item() == 5.0

    with ThreadPoolExecutor(3) as pool:
        # An error of a thread is raised here.
        list(pool.map(work, range(3)))
    assert_torchs_own()

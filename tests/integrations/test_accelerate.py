"""ClippedOptimizer under Accelerate: it clips once a step, and its norms reach the tracker."""

import json

import pytest
import torch

import tritonclip
from helpers.cases import assert_bits

pytest.importorskip("accelerate", reason="needs tritonclip[integrations]")

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from helpers.digits import BATCHES, MAX_NORM, loader, loss_of, network, sgd, train_by_hand

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class JsonLines(GeneralTracker):
    """A tracker that writes one line a call."""

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, path):
        super().__init__()
        self.path = path

    @property
    def tracker(self):
        return self.path

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


class Run:
    """The recipe of the README, in pieces that the tests can stop between."""

    def __init__(self, scaler=None, **options):
        self.accelerator = Accelerator(cpu=True, **options)
        # On the CPU, Accelerate makes no scaler of its own; it uses one all the same.
        self.accelerator.scaler = scaler
        self.plain = network()
        self.clipped = tritonclip.ClippedOptimizer(sgd(self.plain), MAX_NORM)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.clipped, 1, gamma=1.0)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            self.plain, self.clipped, loader(), self.scheduler
        )
        self.skipped = 0

    def epoch(self):
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model, batch))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                stats = self.clipped.stats.summary()
                self.skipped += self.optimizer.step_was_skipped
                self.accelerator.log({"grad_norm": stats["norm"]}, step=stats["steps"])
        return self


def poison(batches):
    """Makes the last batch overflow."""
    batches.dataset.tensors[0][-1] = torch.inf


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3], ids=["each", "accumulate-3"])
def test_accelerate_clips_once_a_step(accumulate, precision):
    run = Run(mixed_precision=precision, gradient_accumulation_steps=accumulate).epoch()

    by_hand = network()
    autocast = torch.bfloat16 if precision == "bf16" else None
    norms = train_by_hand(by_hand, loader(), accumulate, autocast)
    assert run.clipped.stats.steps == run.clipped.stats.clipped_steps == len(norms)
    assert_bits(run.plain.parameters(), by_hand.parameters())


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, tritonclip.GradScaler])
@pytest.mark.parametrize("accumulate", [1, 3], ids=["each", "accumulate-3"])
def test_scaler_is_undone_before_clipping(accumulate, scaler):
    by_hand = network()
    run = Run(scaler("cpu"), gradient_accumulation_steps=accumulate)
    poison(run.loader)

    run.epoch()

    batches = loader()
    poison(batches)
    norms = train_by_hand(by_hand, batches, accumulate, scaler=torch.amp.GradScaler("cpu"))
    assert len(norms) == BATCHES // accumulate - 1
    assert run.clipped.stats.steps == len(norms)
    assert run.skipped == 1
    # The scheduler does not count the step either.
    assert run.scheduler.state_dict()["last_epoch"] == len(norms)
    assert_bits(run.plain.parameters(), by_hand.parameters())


def test_log_writes_the_norm_before_clipping(tmp_path):
    run = Run(log_with=JsonLines(tmp_path / "log.jsonl"))
    run.accelerator.init_trackers("digits")

    run.epoch()
    run.accelerator.end_training()

    lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    norms = train_by_hand(network(), loader())
    assert [*lines] == [{"step": i, "grad_norm": norm} for i, norm in enumerate(norms, 1)]


def test_prepare_keeps_statistics():
    model = network()
    clipped = tritonclip.ClippedOptimizer(sgd(model), MAX_NORM)
    loss_of(model, next(iter(loader()))).backward()
    clipped.step()
    before = clipped.stats.summary()

    prepared = Accelerator(cpu=True).prepare(clipped)

    assert clipped.stats.summary() == before
    assert prepared.state_dict()["tritonclip"]["steps"] == 1


def test_resumed_run_equals_one_that_went_on(tmp_path):
    whole = Run().epoch().epoch()
    begun = Run().epoch()
    begun.accelerator.save_state(tmp_path)
    resumed = Run()

    resumed.accelerator.load_state(tmp_path)
    resumed.epoch()

    assert resumed.clipped.stats.summary() == whole.clipped.stats.summary()
    assert resumed.clipped.stats.steps == 2 * BATCHES
    assert_bits(resumed.plain.parameters(), whole.plain.parameters())

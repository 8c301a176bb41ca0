"""Trainers under `patch_torch`: they clip by tritonclip, and train as without the patch.

Not reached: FSDP1's method, DeepSpeed and Megatron, which have functions of their own.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import tritonclip
from helpers.digits import MAX_NORM, loader, loss_of, network, sgd

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]


def by_loop(folder: Path) -> torch.nn.Module:
    """A loop that imported the function by its name."""
    from torch.nn.utils import clip_grad_norm_

    model = network()
    optimizer = sgd(model)
    for batch in loader():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return model


def by_accelerate(folder: Path) -> torch.nn.Module:
    """Accelerate's own call."""
    accelerate = pytest.importorskip("accelerate", reason="needs tritonclip[integrations]")
    accelerator = accelerate.Accelerator(cpu=True)
    plain = network()
    model, optimizer, batches = accelerator.prepare(plain, sgd(plain), loader())
    for batch in batches:
        accelerator.backward(loss_of(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return plain


def by_fabric(folder: Path) -> torch.nn.Module:
    """Fabric's `clip_gradients`."""
    lightning = pytest.importorskip("lightning", reason="needs tritonclip[integrations]")
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    plain = network()
    model, optimizer = fabric.setup(plain, sgd(plain))
    for batch in loader():
        optimizer.zero_grad()
        fabric.backward(loss_of(model, batch))
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
    return plain


def by_lightning(folder: Path) -> torch.nn.Module:
    """Lightning's `gradient_clip_val`."""
    lightning = pytest.importorskip("lightning", reason="needs tritonclip[integrations]")
    from integrations.lightning_trainer import quiet_trainer

    class Digits(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return loss_of(self.model, batch)

    module = Digits()
    quiet_trainer(folder, 1, gradient_clip_val=MAX_NORM).fit(module, loader())
    return module.model


def by_transformers(folder: Path) -> torch.nn.Module:
    """Hugging Face Trainer's `max_grad_norm`."""
    pytest.importorskip("accelerate", reason="needs tritonclip[integrations]")
    transformers = pytest.importorskip("transformers", reason="needs tritonclip[integrations]")
    from integrations.hugging_face import arguments_of, language_model, sequences

    arguments = arguments_of(folder, max_grad_norm=MAX_NORM)
    trainer = transformers.Trainer(language_model(), arguments, train_dataset=sequences(6))
    trainer.train()
    return trainer.model  # type: ignore[no-any-return]


TRAINERS = [by_loop, by_accelerate, by_fabric, by_lightning, by_transformers]


@pytest.mark.parametrize("train", TRAINERS, ids=lambda train: train.__name__)
def test_trainer_clips_by_tritonclip_and_trains_as_before(tmp_path, train):
    expected = copy.deepcopy(train(tmp_path / "plain").state_dict())
    path = tmp_path / "norms.csv"
    with tritonclip.record(path) as recorder, tritonclip.patch_torch(recorder=recorder) as patch:
        found = train(tmp_path / "patched").state_dict()
        n_calls = recorder.steps
    assert n_calls >= 6
    assert not patch.served_by_torch
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)

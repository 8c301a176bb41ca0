"""Training by packages that are no extra, under `patch_torch` and without: losses and weights.

`nox -s trainers` installs them. They were run with TRL 1.16, Stable-Baselines3 2.9, timm 1.0.31,
torchtune 0.6.1 and torchtitan 0.3.0.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import tritonclip
from helpers.digits import MAX_NORM, loader, loss_of, network, sgd
from tritonclip.monitor.history import read

REASON = "nox -s trainers installs it"
# A limit that clips every step, and what a run leaves: its losses, and its weights.
Run = Callable[[Path], tuple[list[float], list[torch.Tensor]]]


def by_trl(folder: Path) -> tuple[list[float], list[torch.Tensor]]:
    """TRL's SFTTrainer, by `max_grad_norm`."""
    trl = pytest.importorskip("trl", reason=REASON)
    datasets = pytest.importorskip("datasets", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    tokenizers = pytest.importorskip("tokenizers", reason=REASON)
    words = {f"w{i}": i for i in range(12)} | {"<unk>": 12, "<eos>": 13}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 14}
    texts = [" ".join(f"w{(7 * i + j) % 12}" for j in range(8)) for i in range(24)]
    trainer = trl.SFTTrainer(
        model=transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**sizes, bos_token_id=13, eos_token_id=13)
        ),
        args=trl.SFTConfig(
            output_dir=str(folder),
            optim="sgd",
            learning_rate=0.2,
            max_grad_norm=MAX_NORM,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
        ),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, [*trainer.model.parameters()]


def by_stable_baselines3(folder: Path) -> tuple[list[float], list[torch.Tensor]]:
    """Stable-Baselines3's PPO, by `max_grad_norm`."""
    baselines = pytest.importorskip("stable_baselines3", reason=REASON)
    ppo = baselines.PPO(
        "MlpPolicy",
        "CartPole-v1",
        n_steps=32,
        batch_size=16,
        n_epochs=2,
        max_grad_norm=MAX_NORM,
        seed=0,
        device="cpu",
    )
    ppo.learn(64)
    loss = ppo.logger.name_to_value["train/loss"]
    return [float(loss)], [*ppo.policy.parameters()]


def by_loop(
    clip: Callable[[torch.nn.Module, int], Any],
) -> tuple[list[float], list[torch.Tensor]]:
    """A loop by hand, which clips a model at a step by a function."""
    model, losses = network(), []
    optimizer = sgd(model)
    for i, batch in enumerate(loader()):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        clip(model, i)
        optimizer.step()
        losses.append(loss.item())
    return losses, [*model.parameters()]


def by_timm(folder: Path) -> tuple[list[float], list[torch.Tensor]]:
    """timm's `dispatch_clip_grad`, as its train script calls it; half of the steps by value."""
    clip = pytest.importorskip("timm.utils", reason=REASON).dispatch_clip_grad
    by_value, by_norm = {"value": 0.01, "mode": "value"}, {"value": MAX_NORM, "mode": "norm"}
    return by_loop(lambda one, i: clip(one.parameters(), **(by_value if i % 2 else by_norm)))


def by_torchtune(folder: Path) -> tuple[list[float], list[torch.Tensor]]:
    """torchtune's model, and the step of its recipes in the order in which they have it.

    A stand-in for the recipes, which need a checkpoint and a tokenizer: gradients are divided by
    the number of tokens by `scale_grads`, and `clip_grad_norm` is a text.
    """
    llama = pytest.importorskip("torchtune.models.llama3", reason=REASON)
    training = pytest.importorskip("torchtune.training", reason=REASON)
    torch.manual_seed(0)
    model = llama.llama3(
        vocab_size=13, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=16, max_seq_len=8
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for i in range(8):
        tokens = (torch.arange(4)[:, None] * 7 + torch.arange(9) + i) % 13
        n_tokens = torch.tensor(32)
        loss = cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="sum")
        loss.backward()
        training.scale_grads(model, 1 / n_tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=float("0.2"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses, [*model.parameters()]


def by_torchtitan(folder: Path) -> tuple[list[float], list[torch.Tensor]]:
    """torchtitan's `clip_grad_norm_`, with the arguments of its trainer, which needs a GPU.

    It calls `get_total_norm` and `clip_grads_with_norm_`.
    """
    utils: Any = pytest.importorskip("torchtitan.distributed.utils", reason=REASON)
    options = {"foreach": True, "pp_mesh": None, "ep_enabled": False}
    return by_loop(lambda one, _: utils.clip_grad_norm_([*one.parameters()], MAX_NORM, **options))


RUNS = [by_trl, by_stable_baselines3, by_timm, by_torchtune, by_torchtitan]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_package_clips_by_tritonclip_and_trains_as_before(tmp_path, run):
    losses, weights = run(tmp_path / "plain")
    path = tmp_path / "norms.csv"
    with tritonclip.record(path) as recorder, tritonclip.patch_torch(recorder=recorder) as patch:
        found, ours = run(tmp_path / "patched")
    history = read(path)
    assert len(history.norms) >= 6
    # So that clipping matters.
    assert sum(history.norms > history.limits) >= len(history.norms) // 2
    assert not patch.served_by_torch
    assert losses
    assert found == pytest.approx(losses, rel=1e-4, abs=1e-5)
    for one, other in zip(ours, weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

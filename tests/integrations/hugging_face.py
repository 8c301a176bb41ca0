"""A small language model of Hugging Face, texts for it, and arguments of a quiet Trainer."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

BATCH = 4


def language_model() -> Any:
    """The same weights every time."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 13}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def sequences(batches: int) -> list[dict[str, torch.Tensor]]:
    """Texts that count modulo 13, from anywhere: something that can be learned."""
    ids = (torch.arange(batches * BATCH)[:, None] * 7 + torch.arange(16)) % 13
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments_of(folder: Path, **options: Any) -> TrainingArguments:
    """SGD, to which the length of a gradient matters, on the CPU; nothing is written or shown."""
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    training = {"optim": "sgd", "learning_rate": 0.2, "num_train_epochs": 1, **quiet, **options}
    return TrainingArguments(str(folder), per_device_train_batch_size=BATCH, **training)

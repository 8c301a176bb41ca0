"""Lightning's Trainer with nothing on screen, its log, its checkpoints, and marks of tests."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.pytorch.loggers import CSVLogger

from helpers.cases import assert_bits
from helpers.digits import BATCHES, loader

FITTING = [
    # Advice for real data and real machines.
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


def quiet_trainer(
    folder: Path,
    epochs: int,
    log_every: int = 1,
    *,
    enable_checkpointing: bool = False,
    **options: Any,
) -> Any:
    """A trainer on the CPU that writes to `folder` only."""
    return lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        enable_checkpointing=enable_checkpointing,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=log_every,
        logger=CSVLogger(folder, version="run"),
        max_epochs=epochs,
        **options,
    )


def logged(folder: Path, name: str) -> dict[int, float]:
    """A column of the logger's file, by step."""
    with (folder / "lightning_logs" / "run" / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def stats_of(trainer: Any) -> dict[str, Any]:
    """The statistics of a trainer's optimizer."""
    summary: dict[str, Any] = trainer.optimizers[0].stats.summary()
    return summary


def assert_resumes(folder: Path, trainer_of: Callable[..., Any], kind: Callable[[], Any]) -> None:
    """A run that goes on from a checkpoint equals one that was not stopped."""
    straight, first, second = kind(), kind(), kind()
    whole = trainer_of(folder / "whole", epochs=2)
    whole.fit(straight, loader())
    begun = trainer_of(folder / "begun")
    begun.fit(first, loader())
    begun.save_checkpoint(folder / "half.ckpt")
    resumed = trainer_of(folder / "resumed", epochs=2)

    resumed.fit(second, loader(), ckpt_path=folder / "half.ckpt")

    assert stats_of(resumed) == stats_of(whole)
    assert stats_of(resumed)["steps"] == 2 * BATCHES
    assert_bits(second.model.parameters(), straight.model.parameters())

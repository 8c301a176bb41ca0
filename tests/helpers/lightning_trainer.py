"""Lightning's Trainer with nothing on screen, its log, and the marks of tests that fit."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.pytorch.loggers import CSVLogger

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

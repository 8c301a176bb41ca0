"""Lightning's Trainer with nothing on screen."""

from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.loggers import CSVLogger


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

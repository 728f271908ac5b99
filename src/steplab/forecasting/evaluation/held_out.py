"""Whether the generated series of an evaluation were truly held out from a model's training."""

from __future__ import annotations

from pathlib import Path

from steplab.core.errors import UserError
from steplab.forecasting.evaluation.data import EVALUATION_SEED
from steplab.train.checkpoint import read_progress
from steplab.train.checkpoint_folder import CHECKPOINT_FILE


def check_held_out(checkpoint: Path) -> None:
    """Refuse a checkpoint that was trained on generated series of the evaluation's own seed."""
    if not (checkpoint / CHECKPOINT_FILE).is_file():
        return  # a model of another origin
    settings = read_progress(checkpoint).spec.get("settings", {})
    if not settings.get("dataset_path") and settings.get("seed") == EVALUATION_SEED:
        raise UserError(
            f"{checkpoint} was trained with the seed of the evaluation's series, "
            f"{EVALUATION_SEED}, so they are not held out.",
            "Give other series with --data, or train with another --seed.",
        )

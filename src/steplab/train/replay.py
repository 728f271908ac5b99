"""A run that goes back to a checkpoint computes some steps again: it must log the same losses.

Otherwise windows were skipped or repeated, or the run does not repeat itself, and the trained model
would be another one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import steplab
from steplab.core import TrainSpec
from steplab.core.codec import encode
from steplab.core.errors import MeasurementError
from steplab.core.input_file import is_missing, open_input
from steplab.probes.environment import cpu_name
from steplab.techniques.recipes import PARALLEL, alone

TAIL = 16 << 20  # bytes at the end of the log that are read: 20,000 rows and more
# A GPU may add in another order each time; other windows change the loss by more, as a rule.
GPU_TOLERANCE = 0.01
KINDS = (("step", int), ("steps", int), ("train/loss", float), ("run", str))  # of a row


def run_identity(spec: TrainSpec, data: str, device: torch.device) -> str:
    """Return 16 hex digits that are equal for runs whose losses must be the same bits.

    What is left out cannot change a loss; the number of ranks is left out with `parallel.exact`.
    """
    settings = spec.settings
    resumable = {f.name for f in fields(settings) if f.metadata["resumable"]}
    kept = {name: value for name, value in encode(settings).items() if name not in resumable}
    exact = bool(spec.recipe.techniques.get(PARALLEL, {}).get("exact"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    what = {
        **kept,
        "accumulate": spec.micro_batches,
        "total_steps": settings.total_steps,
        "model": [spec.workload, encode(spec.config), spec.source],
        "recipe": encode(alone(spec.recipe) if exact else spec.recipe),
        "ranks": 0 if exact else spec.ranks,
        "data": data,
        "machine": [device.type, name, torch.get_num_threads()],
        "code": [str(torch.__version__), steplab.__version__],
    }
    text = json.dumps(what, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Replay:
    """The losses that a run has logged for steps after `step`; `check` compares new ones.

    Only the rank that writes the log has one; the others give None, and compare nothing.
    """

    def __init__(
        self, log: Path | None, run: str = "", step: int = 0, on_gpu: bool = False
    ) -> None:
        self.tolerance = GPU_TOLERANCE if on_gpu else 0.0
        # By last step and number of steps of a row: a row that covers other steps is no rival.
        self.logged = {
            (row["step"], row["steps"]): row["train/loss"]
            for row in (_rows(log) if log else [])
            if row["run"] == run and row["step"] > step
        }

    def check(self, step: int, steps: int, loss: float) -> None:
        """Raise a MeasurementError where `steps` steps up to `step` once had another mean loss."""
        before = self.logged.pop((step, steps), None)
        if before is None or math.isclose(loss, before, rel_tol=self.tolerance):
            return
        raise MeasurementError(
            f"Step {step} was logged with loss {before!r}, and computed again it has {loss!r}: the "
            "run does not repeat itself.",
            "Look for random numbers of your own, or a device that errs; to go on with what is "
            "there, move metrics.jsonl away.",
        )


def _rows(log: Path) -> list[dict[str, Any]]:
    """Return the last rows of the log that tell the loss of some steps."""
    if is_missing(log):
        return []
    with open_input(log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        lines = file.read(TAIL).splitlines()
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut by a full disk, or the first of the tail
        if isinstance(row, dict) and all(isinstance(row.get(key), kind) for key, kind in KINDS):
            rows.append(row)
    return rows

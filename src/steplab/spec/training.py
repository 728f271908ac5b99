"""What `train` does: settings that become flags, and the spec that a checkpoint carries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from steplab.errors import UserError
from steplab.spec.knob import knob
from steplab.spec.recipe import Recipe
from steplab.spec.spec import RunSpec

LARGEST_RATE = 100.0  # AdamW moves every weight by about the rate: beyond this it is a slip


@dataclass(frozen=True)
class TrainSettings:
    """How to train. Those marked * may change when a run is resumed; the others make the run."""

    dataset_path: str = knob(
        "", "* file or folder of series or text; empty: generated or Python's own; a,b with --mix"
    )
    mix: str = knob("", "shares in which the sets a,b of --dataset-path are drawn: 0.7,0.3")
    val_path: str = knob(
        "", "* for validation; empty: generated or Python's own, none with own data"
    )
    ood_path: str = knob("", "* series of another kind, for out-of-distribution validation")
    from_checkpoint: str = knob(
        "", "take the weights and the model of a checkpoint or a Time-MoE folder; the rest is new"
    )
    normalise: Literal["series", "max", "none"] = knob(
        "series", "scale by each whole series' mean and deviation, by its largest value, or not"
    )
    seq_stride: int = knob(0, "points between windows; 0: the window's length")
    pack: bool = knob(False, "several short series and tails in one window, each by itself")
    batch_size: int = knob(16, "windows per micro-batch")
    accumulate: int = knob(1, "micro-batches per step")
    epochs: int = knob(1, "* epochs")
    steps_per_epoch: int = knob(600, "* steps per epoch; 0 builds the model, says its size, ends")
    lr: float = knob(1e-3, "highest learning rate")
    min_lr: float = knob(5e-5, "learning rate at the end of the cosine")
    warmup_steps: int = knob(-1, "steps of linear warm-up; -1: a twentieth of the run")
    clip: float = knob(1.0, "largest gradient norm; 0 for none")
    seed: int = knob(42, "of weights, data order and generated series")
    workers: int = knob(2, "* threads that read windows ahead")
    log_every: int = knob(50, "* steps between lines")
    validate_every: int = knob(200, "* steps between validations; 0: at the end only")
    validation_batches: int = knob(8, "* batches per validation")
    checkpoint_dir: str = knob("checkpoints", "* folder of the checkpoints")
    checkpoint_every: int = knob(200, "* steps between checkpoints; 0: none at all")
    keep_last: int = knob(3, "* checkpoints to keep; 0 keeps all")
    log_perf_metrics: bool = knob(False, "* print FLOPs, MFU and device counters")
    mfu_peak_tflops: float | None = knob(None, "* dense peak to use for MFU")
    profile: bool = knob(False, "* record a Chrome trace of step 21")

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate", "epochs", "log_every", "workers"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.warmup_steps < -1:
            raise UserError(f"warmup_steps must be -1 or more, not {self.warmup_steps}.")
        counts = ("steps_per_epoch", "seq_stride", "validate_every")
        for name in (*counts, "validation_batches", "checkpoint_every", "keep_last"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative, but is {getattr(self, name)}.")
        if not 0 < self.lr <= LARGEST_RATE or not 0 <= self.min_lr <= self.lr:
            raise UserError(
                f"lr {self.lr} must lie between 0 and {LARGEST_RATE}, min_lr {self.min_lr} between "
                "0 and lr."
            )
        if not 0 <= self.clip < math.inf:
            raise UserError(f"clip must be 0 or a positive number, not {self.clip}.")

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.epochs * self.steps_per_epoch


@dataclass(frozen=True)
class TrainSpec:
    """Everything that decides a training run. Frozen, JSON both ways."""

    workload: str
    config: Mapping[str, Any]
    size: str = ""
    recipe: Recipe = field(default_factory=Recipe)
    device: str = "cpu"
    settings: TrainSettings = field(default_factory=TrainSettings)

    def run_spec(self) -> RunSpec:
        """Return the spec of one step of this run."""
        return RunSpec(
            self.workload,
            self.config,
            self.size,
            batch=self.settings.batch_size,
            accumulate=self.settings.accumulate,
            recipe=self.recipe,
            device=self.device,
            clip=self.settings.clip,
            seed=self.settings.seed,
            peak_tflops=self.settings.mfu_peak_tflops,
        )

"""RunSpec: everything that decides what one measurement does."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from steplab.codec import encode
from steplab.errors import UserError
from steplab.spec.recipe import Recipe

Mode = Literal["infer", "forward", "forward+backward", "full"]
MODES: tuple[str, ...] = get_args(Mode)


@dataclass(frozen=True)
class RunSpec:
    """One cell of a measurement. Frozen, JSON both ways, compared by `fingerprint`."""

    workload: str  # a name on the shelf, or path/to/file.py:factory
    config: Mapping[str, Any] = field(default_factory=dict)  # every field of the workload's config
    size: str = ""  # the preset that `config` started from, for people
    batch: int = 4  # sequences per micro-batch
    accumulate: int = 1  # micro-batches per optimizer step
    mode: Mode = "full"
    recipe: Recipe = field(default_factory=Recipe)
    device: str = "cpu"  # "cpu" or "cuda"
    clip: float = 1.0  # largest gradient norm; 0 leaves gradients alone
    warmup: int = 5  # untimed steps after compilation has settled
    steps: int = 10  # timed steps
    seed: int = 42
    peak_tflops: float | None = None  # the user's own dense peak for MFU; None: the catalog's
    source: str = ""  # hash of the file that a user's own workload came from

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.warmup < 0 or self.clip < 0:
            raise UserError("warmup and clip must not be negative.")
        if not math.isfinite(self.clip):
            raise UserError(f"clip must be a finite number, not {self.clip}.")
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            raise UserError(f"The peak must be more than 0 TFLOP/s, not {self.peak_tflops}.")
        if self.mode not in MODES:
            raise UserError(f"mode is {self.mode!r}.", f"Known: {', '.join(MODES)}.")


def fingerprint(spec: RunSpec) -> str:
    """Return 16 hex digits that are equal exactly for equal specs, on any machine."""
    text = json.dumps(encode(spec), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

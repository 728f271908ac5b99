"""Work: floating-point operations of one step; Figures: that work against time and a peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """FLOPs of one whole step in its mode, all micro-batches included.

    Three counts that are never mixed: `model` has active matmul parameters and visible
    attention pairs; `palm` the same with every attention pair (the PaLM convention); `hardware`
    what the kernels execute, recomputation included. `vector` is work that runs outside the
    tensor cores (FFT, scans) and belongs to none of the three. None: not known.
    """

    tokens: int
    model: float | None
    palm: float | None
    hardware: float | None
    vector: float = 0.0
    formula: str = ""
    covered_calls: int | None = None  # matmul-class calls with a FLOP formula, when counted
    uncovered_calls: Mapping[str, int] = field(default_factory=dict)  # op -> calls without one


@dataclass(frozen=True)
class Figures:
    """Utilisation as fractions of the dense peak of the dtype that ran; None: unknown."""

    mfu: float | None
    mfu_palm: float | None
    hfu: float | None
    peak_tflops: float | None
    peak_source: str
    warning: str = ""

    @property
    def possible_mfu(self) -> float | None:
        """MFU, unless it is above 1: then the peak, the dtype or the FLOP count is wrong."""
        return self.mfu if self.mfu is not None and self.mfu <= 1 else None

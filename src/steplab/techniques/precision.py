"""Precision of the matrix products: fp32, tf32, or autocast to bf16 or fp16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from steplab.errors import Unsupported
from steplab.record import Ran
from steplab.spec.recipe import Setting
from steplab.techniques.technique import Stage, StepParts, Technique

TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
# What the profiler calls the C++ types.
TRACED_NAMES = {"bf16": "c10::BFloat16", "fp16": "c10::Half", "fp32": "float", "tf32": "float"}


@dataclass(frozen=True)
class PrecisionSettings:
    """`fp32`: no TF32. `tf32`: fp32 storage, 10-bit products. `bf16`, `fp16`: autocast."""

    dtype: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"


class Precision(Technique):
    """Weights stay fp32 throughout; fp16 adds a gradient scaler against underflow."""

    summary = "fp32, tf32, bf16 autocast, or fp16 autocast with a gradient scaler"
    stage = Stage.PRECISION
    settings: ClassVar[type] = PrecisionSettings

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Set the global matmul precision or the forward's autocast context."""
        import torch

        dtype = str(settings["dtype"])
        parts.matmul_dtype = dtype
        if dtype == "tf32":
            if parts.device.type != "cuda" or torch.cuda.get_device_capability() < (8, 0):
                raise Unsupported(
                    "tf32 needs an NVIDIA GPU of compute capability 8.0 or newer.",
                    "Use precision=fp32 or precision=bf16.",
                )
            torch.set_float32_matmul_precision("high")
        if dtype in TORCH_NAMES:
            kind = parts.device.type
            half = getattr(torch, TORCH_NAMES[dtype])
            parts.forward_context = lambda: torch.autocast(kind, dtype=half)
        if dtype == "fp16":
            parts.scaler = torch.amp.GradScaler(parts.device.type)

    def deviation(self, settings: Mapping[str, Setting], ran: Ran) -> str:
        """Autocast must reach the matrix products; tf32 must still be on when they ran."""
        asked = str(settings["dtype"])
        wanted = TRACED_NAMES[asked]
        if ran.matmul_dtypes and wanted not in ran.matmul_dtypes:
            seen = ", ".join(f"{n} x {d}" for d, n in ran.matmul_dtypes.items())
            return f"precision {asked} was asked for, but the matrix products ran as {seen}"
        if asked == "tf32" and ran.matmul_precision != "high":
            return f"tf32 was asked for, but matmul precision was {ran.matmul_precision!r}"
        if asked == "fp32" and ran.matmul_precision != "highest":
            return f"fp32 was asked for, but matmul precision was {ran.matmul_precision!r}"
        return ""


TECHNIQUE = Precision()

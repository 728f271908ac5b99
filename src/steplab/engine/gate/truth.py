"""The truth in fp64, and the peers whose own error against it is the measure of a candidate's."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import nn

from steplab.engine.assemble import assemble
from steplab.engine.gate.evidence import Evidence, gather
from steplab.engine.gate.rounding import RoundedProducts
from steplab.engine.gate.shapes import AUTOCAST, ROUNDED, TRUTH
from steplab.engine.step import Step
from steplab.spec import PLAIN, RunSpec


def reference(spec: RunSpec, name: str, rate: float = 1.0) -> Evidence:
    """Return what the plain step of `spec` computes, by one of the names of `references_of`.

    "fp64" is the truth and "fp32" the plain step as it is. "bf16-rounded" is the truth with every
    matrix product rounded so: what the precision leaves no choice about. "bf16-autocast" is what
    torch makes of the plain step in that precision: between products it rounds, too. `rate` times
    the learning rate is taken.
    """
    step = fresh(replace(spec, recipe=PLAIN))
    dtype, _, how = name.partition("-")
    if how == AUTOCAST:
        _lower(step, dtype)
    if name == TRUTH or how == ROUNDED:
        step.model.double()
        rounding = RoundedProducts(dtype) if how else contextlib.nullcontext()
        with rounding:
            return gather(step, spec, rate, doubled=True)
    return gather(step, spec, rate)


def _lower(step: Step, dtype: str) -> None:
    """Let torch itself run the step in tf32, bf16 or fp16."""
    kind = step.parts.device.type
    if dtype == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        return
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    step.parts.forward_context = lambda: torch.autocast(kind, dtype=half)
    if half is torch.float16:
        step.parts.scaler = torch.amp.GradScaler(kind)


def fresh(spec: RunSpec) -> Step:
    """Return a step whose dropout is off: no two implementations draw the same random numbers."""
    step = assemble(spec)
    for module, name in dropouts(step.model):
        setattr(module, name, 0.0)
    return step


def dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules that drop something, and the name of the attribute that says how much."""
    found = []
    for module in model.modules():
        name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
        share = getattr(module, name, None)
        if isinstance(share, float) and share > 0:
            found.append((module, name))
    return found

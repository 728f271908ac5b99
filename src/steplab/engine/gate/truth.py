"""The truth in fp64, and the peers whose own error against it is the measure of a candidate's."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from torch import nn

from steplab.engine.assemble import assemble
from steplab.engine.gate.evidence import Evidence, gather
from steplab.engine.gate.rounding import RoundedProducts
from steplab.engine.gate.shapes import PLAIN_DTYPE, TRUTH
from steplab.engine.step import Step
from steplab.spec import PLAIN, RunSpec


def reference(spec: RunSpec, dtype: str) -> Evidence:
    """Return what the plain step of `spec` computes: in fp64, as it is, or with rounded products.

    `dtype` is "fp64" for the truth, else the precision that a candidate declares: "fp32" is the
    plain step itself; for the others its products are rounded so, and everything else is exact.
    """
    step = fresh(replace(spec, recipe=PLAIN))
    if dtype == PLAIN_DTYPE:
        return gather(step, spec)
    step.model.double()
    rounding = contextlib.nullcontext() if dtype == TRUTH else RoundedProducts(dtype)
    with rounding:
        return gather(step, spec, doubled=True)


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

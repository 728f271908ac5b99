"""One block's moving averages alone, forward and backward, as a trace per path. Imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from steplab.errors import MeasurementError
from steplab.kernels import ema as ema_op
from steplab.studies.playbook.plan import Cell
from steplab.workloads.megalodon.averages import MovingAverages

SHORT_NAMES = {"sequential": "seq"}


def micro_traces(cell: Cell, device: torch.device) -> list[str]:
    """Write ema_fft.json, ema_seq.json and, where it runs, ema_scan.json; return their names."""
    dtype = torch.bfloat16 if cell.spec.recipe.techniques["precision"]["dtype"] == "bf16" else None
    shape = (cell.spec.batch, cell.length, cell.spec.config["width"])
    with torch.device(device):
        module = MovingAverages(cell.spec.config["width"], cell.spec.config["modes"])
        x_BLD = torch.randn(shape, dtype=dtype, requires_grad=True)
    written = []
    for impl in ("fft", "sequential", "scan"):
        if ema_op.IMPLS[impl].refuse(x_BLD, module.parameters_now()):
            continue
        name = SHORT_NAMES.get(impl, impl)
        module.impl = impl
        _trace(
            module, x_BLD, f"EMA_{name.upper()}_L{cell.length}", cell.folder / f"ema_{name}.json"
        )
        if module.ran != impl:
            raise MeasurementError(f"ema {impl!r} was asked for, but {module.ran!r} ran.")
        written.append(f"ema_{name}.json")
    return written


def _trace(module: MovingAverages, x_BLD: Any, label: str, path: Path) -> None:
    """Run twice, the first time unseen; labels need the CPU's events too."""
    activities = [ProfilerActivity.CPU]
    if x_BLD.is_cuda:
        activities.append(ProfilerActivity.CUDA)

    inputs = (x_BLD, *module.parameters())

    def once() -> None:
        y_BLD, _ = module(x_BLD)
        # Not backward(), which would add to the gradients of the time before.
        torch.autograd.grad(y_BLD, inputs, torch.ones_like(y_BLD))
        if x_BLD.is_cuda:
            torch.cuda.synchronize()

    once()
    with profile(activities=activities, acc_events=True) as profiler, record_function(label):
        once()
    profiler.export_chrome_trace(str(path))

"""RunSpec to Step: build the workload, apply the techniques in the order of their stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from steplab.engine.step import Step
from steplab.errors import UserError, no_gpu
from steplab.spec import RunSpec
from steplab.techniques.parse import check_recipe, technique
from steplab.techniques.technique import StepParts
from steplab.workloads.workload import Workload, find_workload


def assemble(spec: RunSpec, workload: Workload | None = None) -> Step:
    """Return the Step that `spec` describes, on its device, ready for its first call.

    Global torch settings that techniques touch are put back to torch's defaults first, so that
    one assembly cannot leak into the next.
    """
    check_recipe(spec.recipe)
    device = find_device(spec.device)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # torch's default lets convolutions use TF32
    torch.manual_seed(spec.seed)
    workload = workload or find_workload(spec.workload).open(spec.config)
    with torch.device(device):
        model = workload.model()
    parts = StepParts(model, device, torch.amp.GradScaler(device.type, enabled=False))
    chosen = [(technique(name), given) for name, given in spec.recipe.techniques.items()]
    for one, settings in sorted(chosen, key=lambda pair: pair[0].stage):
        one.apply(parts, settings)
    optimizer = None
    if spec.mode == "full":
        optimizer = workload.optimizer(model, **parts.optimizer_options)
        if parts.wrap_optimizer_step is not None:
            _wrap_step(optimizer, parts)
    return Step(workload, parts, optimizer, spec.mode, spec.clip)


def _wrap_step(optimizer: torch.optim.Optimizer, parts: StepParts) -> None:
    """Replace the optimizer's step by the wrapped one.

    Learning rates become tensors: as Python floats a schedule would change a guard, and so
    recompile, at every step.
    """
    assert parts.wrap_optimizer_step is not None
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=parts.device)
    optimizer.step = parts.wrap_optimizer_step(optimizer.step)  # type: ignore[method-assign]


def micro_batches(step: Step, spec: RunSpec) -> Iterator[list[Any]]:
    """Yield what one call of the step takes: a list of `spec.accumulate` micro-batches."""
    stream = iter(step.workload.batches(spec.batch, step.parts.device, spec.seed))
    while True:
        try:
            batches = [next(stream) for _ in range(spec.accumulate)]
        except StopIteration:
            raise UserError(
                "The workload ran out of batches.", "Let batches() yield forever."
            ) from None
        yield batches


def find_device(name: str) -> torch.device:
    """Return the device, or raise a UserError when it is not there."""
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        raise no_gpu()
    raise UserError(f"There is no device {name!r}.", "Use cpu or cuda.")

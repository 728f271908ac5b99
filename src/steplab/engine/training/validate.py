"""Loss on held-out windows."""

from __future__ import annotations

import torch

from steplab.data.loader import Loader
from steplab.data.windows import WindowSet
from steplab.engine.step import Step
from steplab.spec.training import TrainSettings


@torch.no_grad()
def validate(step: Step, windows: WindowSet, settings: TrainSettings) -> float:
    """Return the mean prediction loss over some batches, always the same ones.

    They are drawn from all series by a fixed seed: the first ones would be one series' windows.
    Runs eagerly: a compiled model would need a second set of graphs without gradients.
    """
    batch = min(settings.batch_size, len(windows))
    count = min(settings.validation_batches, len(windows) // batch)
    model, device = step.model, step.parts.device
    model.eval()
    losses = []
    try:
        with (
            Loader(windows, batch, 0, device) as loader,
            torch.compiler.set_stance("force_eager"),
            step.parts.forward_context(),
        ):
            for _ in range(count):
                loss, metrics = step.workload.loss(model, next(loader))
                losses.append(metrics.get("pred", loss).float())
    finally:
        model.train()
    return float(torch.stack(losses).mean())

"""Training that goes on from a checkpoint in a file ends with the same bits."""

from pathlib import Path

import torch

from steplab.core import RunSpec
from steplab.step.assemble import assemble, micro_batches
from steplab.train.checkpoint import restore_checkpoint, save_checkpoint
from steplab.train.checkpoint_files import TrainProgress


def check_that_it_resumes(spec: RunSpec, folder: Path) -> None:
    """Compare three steps in one go with two, a checkpoint, fresh objects and one more."""
    whole, first, second = (assemble(spec) for _ in range(3))
    feed = micro_batches(whole, spec)
    batches = [next(feed) for _ in range(3)]
    for batch in batches:
        whole(batch)
    for batch in batches[:2]:
        first(batch)
    parts = [(step.model, step.optimizer, step.parts.scaler) for step in (first, second)]
    path = save_checkpoint(folder, *parts[0], TrainProgress(2, {}, {}, {}), keep=0)
    restore_checkpoint(path, *parts[1])
    second(batches[2])
    weights = (dict(step.model.named_parameters()) for step in (whole, second))
    for (name, one), other in zip(next(weights).items(), next(weights).values(), strict=True):
        assert torch.equal(one, other), name

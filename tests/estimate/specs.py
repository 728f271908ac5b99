"""Specs of small steps, and the card that they are estimated for."""

from steplab.core import RunSpec
from steplab.estimate.kernels import find_named
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload

H200 = find_named("h200")


def spec_of(recipe="plain", ranks=1, workload="gpt", size="tiny", batch=2, device="cuda", **config):
    """A spec of a built-in workload."""
    entry = find_workload(workload)
    return RunSpec(
        workload,
        entry.resolve(size, config),
        size,
        batch=batch,
        recipe=parse_recipe(recipe),
        device=device,
        ranks=ranks,
    )

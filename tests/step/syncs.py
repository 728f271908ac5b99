"""A step on a GPU under CUDA's sync debug mode: a host that waits for the device is an error."""

from steplab.core import RunSpec
from steplab.step.assemble import assemble, micro_batches
from steplab.step.graphed_call import sync_debug_mode
from steplab.step.step import Step
from steplab.workloads.workload import StepOutput


def run_without_syncs(spec: RunSpec, warmup: int = 3) -> tuple[Step, StepOutput]:
    """Warm up, then run one step in which nothing may wait; return the step and its output."""
    step = assemble(spec)
    feed = micro_batches(step, spec)
    for _ in range(warmup):
        step(next(feed))
    batch = next(feed)
    with sync_debug_mode("error"):
        return step, step(batch)

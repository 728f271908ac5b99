"""Tensors of a step outlive it.

What it sees: memory that was allocated in a step and is still held at its end, and is no weight, no
gradient, no optimizer state and no batch; and memory that grows from step to step.
Why it costs: an output keeps the graph behind it, so that two steps' activations live at once; a
list of outputs, or a graph that is retained, grows until the device is full.
Remedy: keep numbers or detached tensors; no retain_graph=True; delete what the next step replaces.
When it is wrong: a cache that the model fills on purpose, such as keys and values. Plain tensors
that a variable holds and every step replaces are not meant: a queue, a state that is carried over.
"""

from __future__ import annotations

from collections import Counter

from steplab.core import Finding, MemoryTimeline, units
from steplab.findings.case import Case

SHARE = 0.10  # of the step's peak
GROWTH = 0.01  # of the peak, in every step
LEAST, LEAST_ON_CPU = 2**20, 2**16  # bytes; the allocator of a GPU rounds up to half a MiB
SHOWN = 3


def check(case: Case) -> Finding | None:
    """Compare what is left behind with the peak of the step."""
    timeline = case.timeline
    if timeline is None or not timeline.peak_bytes:
        return None
    kept, growth, peak = timeline.kept_bytes, timeline.growth_bytes, timeline.peak_bytes
    if _is_freed_by_gloo(case, timeline):
        return None
    on_cpu = case.run is not None and case.run.spec.device == "cpu"
    least = LEAST_ON_CPU if on_cpu else LEAST
    grows = growth > max(least, GROWTH * peak) and kept > least
    # A queue or a state that every step replaces is there on purpose.
    if not grows and kept - timeline.kept_state_bytes < max(least, SHARE * peak):
        return None
    places: Counter[str] = Counter()
    for block in timeline.kept:
        where = block.line or block.module or block.op or "a place without a stack"
        places[f"{where}, {block.op}" if block.op and block.op != where else where] += block.bytes
    held = f"{units.bytes_(kept)} of a step's tensors are still held when it ends"
    return Finding(
        rule="kept_memory",
        claim=f"memory grows by {units.bytes_(growth)} a step: {held}" if grows else held,
        evidence=(
            *(f"held by {place}" for place in timeline.kept_by[:SHOWN]),
            *(f"allocated at {at}: {units.bytes_(size)}" for at, size in places.most_common(SHOWN)),
            *(f"retain_graph is given at {line}" for line in case.setup_lines("retain_graph")),
        ),
        remedy="keep loss.item() or tensor.detach() instead of outputs with their graph, "
        "no retain_graph=True, and empty lists that the loop appends to",
        stake_bytes=max(kept, growth),
        of_bytes=peak,
        why="an output holds the graph behind it, and that the activations of its step",
    )


def _is_freed_by_gloo(case: Case, timeline: MemoryTimeline) -> bool:
    """Whether what seems to be kept was sent: gloo's threads free it, and no profiler sees them."""
    spec = case.run.spec if case.run is not None else None
    shared = spec is not None and spec.ranks > 1 and spec.device == "cpu"
    return shared and not timeline.kept_by


RULE = check

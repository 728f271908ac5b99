"""Tensors of a step outlive it.

What it sees: memory that was allocated in a step and is still held at its end, and is no weight, no
gradient, no optimizer state and no batch; memory that grows from step to step; and batches that a
step copies from the host and leaves to later ones, with many blocks of the same size at the peak.
Why it costs: an output keeps the graph behind it, so that two steps' activations live at once; a
list of outputs, or a graph that is retained, grows until the device is full.
Remedy: keep numbers or detached tensors; no retain_graph=True; delete what the next step replaces;
two batches ahead are enough to hide a copy.
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
GRAPHS = 0.1  # of what is kept is held by graphs; else all of it by plain tensors
NO_GRAPHS = (
    "keep loss.item() or tensor.detach() instead of outputs with their graph, no "
    "retain_graph=True, and empty lists that the loop appends to"
)
SMALLER = (
    "keep what is read later, as numbers or a copy of that part: x[i].clone(), since a view keeps "
    "all of x; empty lists that the loop appends to"
)
# Batches on the device that a loop needs: one in use, two on their way. Twice as many are a queue.
AHEAD, MANY = 3, 6


def check(case: Case) -> Finding | None:
    """Compare what is left behind with the peak of the step, else look for a queue of batches."""
    return _outlives(case) or _queue(case)


def _queue(case: Case) -> Finding | None:
    """Count blocks at the peak like those that a step copies from the host for a later one."""
    timeline, rows = case.timeline, case.rows
    if timeline is None or rows is None or timeline.growth_bytes > 0:
        return None
    sent = rows.labeled("name", lambda label: "HtoD" in label)
    lines = {rows.work.labels[code] for code in rows.work.line[sent].tolist()}
    there = Counter(one.bytes for one in timeline.at_peak if one.kind == "other")
    left = Counter((one.bytes, one.line) for one in timeline.kept if one.line in lines)
    # Of each block that a step leaves, so many are there; the peak lists the largest 20 blocks.
    deep = {one: there[one[0]] // count for one, count in left.items()}
    depth = max(deep.values(), default=0)
    spare = (depth - AHEAD) * timeline.kept_state_bytes
    if depth < MANY or spare < SHARE * timeline.peak_bytes:
        return None
    _, line = max(deep, key=deep.__getitem__)
    return Finding(
        rule="kept_memory",
        claim=f"{depth} batches or more wait on the device: {units.bytes_(spare)} beyond the "
        f"{AHEAD} that a loop needs",
        evidence=(
            f"each step copies one there at {line}{case.called_at(line)}: "
            f"{units.bytes_(timeline.kept_state_bytes)}",
            *(f"held by {place}" for place in timeline.kept_by[:SHOWN]),
        ),
        remedy="prefetch two batches: one more hides no more of the copy; let the rest wait in "
        "pinned memory of the host",
        stake_bytes=spare,
        of_bytes=timeline.peak_bytes,
        why="a batch is used once, and until then it takes as much memory as in use",
    )


def _outlives(case: Case) -> Finding | None:
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
    graphs = kept - timeline.kept_state_bytes > GRAPHS * kept
    held = f"{units.bytes_(kept)} of a step's tensors are still held when it ends"
    return Finding(
        rule="kept_memory",
        claim=f"memory grows by {units.bytes_(growth)} a step: {held}" if grows else held,
        evidence=(
            *(f"held by {place}" for place in timeline.kept_by[:SHOWN]),
            *(f"allocated at {at}: {units.bytes_(size)}" for at, size in places.most_common(SHOWN)),
            *(f"retain_graph is given at {line}" for line in case.setup_lines("retain_graph")),
        ),
        remedy=NO_GRAPHS if graphs else SMALLER,
        stake_bytes=max(kept, growth),
        of_bytes=peak,
        why="an output holds the graph behind it, and the graph holds the activations"
        if graphs
        else "a tensor that is kept stays whole, also where a view shows a part of it",
    )


def _is_freed_by_gloo(case: Case, timeline: MemoryTimeline) -> bool:
    """Whether what seems to be kept was sent: gloo's threads free it, and no profiler sees them."""
    spec = case.run.spec if case.run is not None else None
    shared = spec is not None and spec.ranks > 1 and spec.device == "cpu"
    return shared and not timeline.kept_by


RULE = check

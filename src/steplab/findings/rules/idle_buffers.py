"""Buffers, copies of weights and an optimizer's state hold memory that no step needs.

What it sees: buffers of modules that no operator reads in a step, or that equal another one, as the
Run recorded it, above 10 % of the step's peak: a causal mask of the longest context in every layer;
and tensors of the shapes of weights that no module, no optimizer and no operator has anything to do
with: a checkpoint that was loaded; frozen weights that equal others in every number: a copy of the
model as a reference for its own adapters; and the state of an optimizer that no step calls: that of
an earlier stage of training.
Why it costs: they live as long as the model or the variable, on the device.
Remedy: drop what nothing reads; share one among all layers; switch the adapters off instead.
When it is wrong: it is read every N steps, or for evaluation only.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case

SHARE = 0.10  # of the step's peak
SHOWN = 3


def check(case: Case) -> tuple[Finding, ...]:
    """Look for all four."""
    found = (_buffers(case), _copies(case), _equal(case), _state(case))
    return tuple(finding for finding in found if finding is not None)


def _copies(case: Case) -> Finding | None:
    """Compare the bytes of copies of weights with the peak."""
    memory = case.run.memory if case.run is not None else None
    copies = case.dataflow.idle_copies if case.dataflow is not None else None
    if memory is None or copies is None or not copies.bytes > SHARE * memory.peak:
        return None
    return Finding(
        rule="idle_buffers",
        claim=f"{units.bytes_(copies.bytes)} of tensors like weights are held, and nothing reads "
        "them",
        evidence=tuple(f"held by {place}" for place in copies.held_by[:SHOWN])
        or ("no variable was found that holds them",),
        remedy="take out of a checkpoint what the loop needs and delete the rest, or load it on "
        "the CPU",
        stake_bytes=copies.bytes,
        of_bytes=memory.peak + copies.bytes,
        why="a tensor lives as long as a variable refers to it, or to a dict that it is in",
    )


def _equal(case: Case) -> Finding | None:
    """Compare the bytes of frozen weights that equal others with the peak."""
    memory = case.run.memory if case.run is not None else None
    equal = case.dataflow.equal_weights if case.dataflow is not None else None
    if memory is None or equal is None or not equal.bytes > SHARE * memory.peak:
        return None
    count = units.counted(equal.weights, "frozen weight")
    return Finding(
        rule="idle_buffers",
        claim=f"{units.bytes_(equal.bytes)} of weights are held twice: {count} equal others in "
        "every number",
        evidence=(
            f"most of it: {', '.join(equal.names[:SHOWN])}",
            *(f"held by {place}" for place in equal.held_by[:SHOWN]),
            *(f"copied at {line}" for line in case.setup_lines("deepcopy")),
        ),
        remedy="keep one: both models can share the modules that neither trains, and a model with "
        "its adapters switched off is its own reference",
        stake_bytes=equal.bytes,
        of_bytes=memory.peak,
        why="nothing trains either of them, so they stay equal for ever",
    )


def _state(case: Case) -> Finding | None:
    """Compare the bytes of state that no step touches with the peak."""
    memory = case.run.memory if case.run is not None else None
    state = case.dataflow.idle_state if case.dataflow is not None else None
    if memory is None or state is None or not state.bytes > SHARE * memory.peak:
        return None
    made = [line for name in state.optimizers for line in case.setup_lines(name)]
    return Finding(
        rule="idle_buffers",
        claim=f"{units.bytes_(state.bytes)} are the state of an optimizer that no step calls "
        f"({', '.join(state.optimizers)})",
        evidence=(
            *(f"held by {place}" for place in state.held_by[:SHOWN]),
            *(f"an optimizer is made at {line}" for line in made),
        ),
        remedy="delete it with its scheduler when its stage of training ends (del optimizer), or "
        "make it in a function that returns",
        stake_bytes=state.bytes,
        of_bytes=memory.peak,
        why="moments are as large as the weights, and live as long as the optimizer",
    )


def _buffers(case: Case) -> Finding | None:
    """Compare the bytes of such buffers with the peak."""
    memory = case.run.memory if case.run is not None else None
    buffers = case.dataflow.buffers if case.dataflow is not None else ()
    unread, copies = sum(one.unread for one in buffers), sum(one.copies for one in buffers)
    if memory is None or not unread + copies > SHARE * memory.peak:
        return None
    what = "that nothing reads" if unread >= copies else "that equal another one"
    names = [
        f"{one.name}: {units.bytes_(size)} {kind}"
        for one in buffers[:SHOWN]
        for size, kind in ((one.unread, "unread"), (one.copies, "of copies"))
        if size
    ]
    return Finding(
        rule="idle_buffers",
        claim=f"{units.bytes_(unread + copies)} are buffers {what}",
        evidence=(
            *names,
            *(f"registered at {line}" for line in case.setup_lines("register_buffer")),
        ),
        remedy="drop the buffer: is_causal=True needs no mask"
        if unread >= copies
        else "register it once and pass it to all layers",
        stake_bytes=unread + copies,
        of_bytes=max(memory.peak, unread + copies),
        why="a buffer lives as long as its module, on the device and in every checkpoint",
    )


RULE = check

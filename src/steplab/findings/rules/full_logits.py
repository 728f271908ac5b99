"""The loss holds the logits of the whole batch at once.

What it sees: a log-softmax over a vocabulary, and the tensors of its size that live at once.
Why it costs: logits, their log-softmax and their gradient are tokens x vocabulary each, often
more than all activations of the model.
Remedy: compute head and loss in chunks of tokens, whose logits are freed before the next chunk:
impl.cross_entropy where the model has our loss, else substitute=loss, or LinearCrossEntropy in a
model of your own.
When it is wrong: the memory is not needed; small shares of the device are a note.
"""

from __future__ import annotations

import math

from steplab.core import Finding, MemoryTimeline, units
from steplab.costs.op_call import OpCall, TensorArg
from steplab.findings.case import Case
from steplab.findings.rows import Rows

MIN_VOCABULARY = 1000
LEAST_BYTES = 16 << 20  # a classifier of 1,000 classes is no vocabulary
# Logits, log-softmax and gradient: what eager cross entropy holds at once.
HELD_AT_ONCE = 3
OF_DEVICE = 0.10  # of its memory: chunks free less than another batch would take
OF_THE_HEAD = ("weights", "gradients", "optimizer state")
OWN_LOSS = "steplab.modules.loss.LinearCrossEntropy in place of both"


def check(case: Case) -> Finding | None:
    """Find the largest log-softmax, and the memory of tensors of its size."""
    if case.rows is None:
        return None
    logits = _largest(case.rows)
    if logits is None:
        return None
    held = _held(case.timeline, logits) if case.timeline else HELD_AT_ONCE * logits.bytes
    if held < LEAST_BYTES:
        return None
    tokens, vocabulary = math.prod(logits.dims[:-1]), logits.dims[-1]
    mask = case.rows.called(lambda call: _logits(call) == logits)
    room = case.capacity_bytes if case.on_device else None
    return Finding(
        rule="full_logits",
        claim=f"logits of {tokens:,} tokens x {vocabulary:,} words hold {units.bytes_(held)}",
        evidence=(f"one such tensor is {units.bytes_(logits.bytes)}", *case.rows.hot_lines(mask)),
        remedy=f"compute the head and the loss in chunks of tokens: {_chunked(case)}",
        stake_bytes=held,
        why="logits, log-softmax and gradient of every token live at once",
        ordinary=room is not None and held < OF_DEVICE * room,
    )


def _chunked(case: Case) -> str:
    """Return what computes them so, in this model."""
    if case.dispatches("cross_entropy"):
        return "impl.cross_entropy=triton_chunked (chunked without a GPU)"
    return OWN_LOSS if case.of_own_loop else f"substitute=loss, or {OWN_LOSS}"


def _largest(rows: Rows) -> TensorArg | None:
    """Return the largest tensor that goes into a log-softmax over a vocabulary."""
    found = [tensor for call in rows.calls if (tensor := _logits(call)) is not None]
    return max(found, key=lambda tensor: tensor.bytes, default=None)


def _logits(call: OpCall) -> TensorArg | None:
    tensor = call.tensor(0) if call.name == "aten::_log_softmax" else None
    return tensor if tensor and tensor.dims and tensor.dims[-1] >= MIN_VOCABULARY else None


def _held(timeline: MemoryTimeline, logits: TensorArg) -> int:
    """Return the bytes at the peak in tensors with as many elements as the logits.

    Blocks of unknown shape count by their size, in any dtype, up to what the eager loss holds.
    """
    sizes = {logits.numel * item for item in (2, 4)}
    blocks = [a for a in timeline.at_peak if a.kind not in OF_THE_HEAD]
    held = sum(a.bytes for a in blocks if a.shape and math.prod(a.shape) == logits.numel)
    shapeless = [a.bytes for a in blocks if not a.shape]
    same_size = sum(found for found in shapeless if any(abs(found - size) <= 512 for size in sizes))
    return held + min(same_size, max(0, HELD_AT_ONCE * logits.bytes - held))


RULE = check

"""Graphs hold memory that the step does not need at once.

What it sees: three or more calls of one model before the first backward, whose activations live
together; forward passes of a model that are recorded for a backward, and backward passes that are
recorded themselves (`create_graph=True`), though nothing goes back through them; CUDA graphs with a
pool of memory each.
Why it costs: activations of a micro-batch could be freed before the next; a recorded pass keeps all
that its gradients would need; of several graphs one runs at a time.
Remedy: backward after every micro-batch; `torch.no_grad()` around a teacher, not `detach()` behind
it; no `create_graph=True`; one pool for all graphs
(`torch.cuda.graph(g, pool=first.pool())`).
When it is wrong: the loss needs all calls at once, as with pairs of views. A cell that is called on
its own results is not meant, nor is `torch.func.grad`, which always records and then drops it.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.core.dataflow import MADE_BEFORE, READ_ONLY, UNUSED
from steplab.findings.case import Case
from steplab.findings.module_calls import callers, outermost_calls, turning_lines
from steplab.findings.rows import Mask
from steplab.trace.attribution import forward_ops
from steplab.trace.events import Ints, Spans, Trace
from steplab.trace.phases import AUTOGRAD_NODE
from steplab.trace.spans import nest

MIN_CALLS = 3
RECORDED = 0.10  # of the operators of backward
# Of the memory that a step takes, in a decoder on an H200: 2.7 of 6.5 GiB.
BY_RECORDING = 0.4
SHARE = 0.10  # of the peak


def check(case: Case) -> tuple[Finding, ...]:
    """Look for each of the four."""
    if case.rows is None:
        return _pools(case)
    trace = case.rows.source
    return (
        *_micro_batches(case, trace),
        *_recorded_forward(case, trace),
        *_recorded_backward(case, trace),
        *_pools(case),
    )


def _micro_batches(case: Case, trace: Trace) -> tuple[Finding, ...]:
    dataflow = case.dataflow
    if dataflow is not None and dataflow.feeds_itself:
        return ()  # a recurrent cell: no backward is possible between its calls
    if _checkpoints(trace):
        return ()  # activations are freed at once
    spans, names, unused = outermost_calls(trace)
    learns = ~unused  # passes without gradients keep nothing
    nodes = trace.ops.start[_nodes(trace)]
    before = names[learns & (spans.start < nodes.min())] if len(nodes) else names[:0]
    calls = int(np.unique(before, return_counts=True)[1].max(initial=0))
    if calls < MIN_CALLS or len(before) < learns.sum():
        return ()
    assert case.rows is not None
    if _is_needless(case, case.rows.labeled("phase", lambda label: label == "forward")):
        return ()
    return _finding(
        case,
        f"the activations of {calls} forward passes live at once",
        1 - 1 / calls,
        "call backward after each of them: (loss / N).backward()",
        "nothing is freed before the one backward at the end",
        [f"called in turn at {line}" for line in _loop(trace, spans)],
    )


def _loop(trace: Trace, calls: Spans) -> list[str]:
    """Return the line of the loop around the calls, and the lines that make them."""
    first, last = calls.start[[0, -1]].tolist()
    loop = turning_lines(trace, int(calls.thread[0]), first, last)
    return list(dict.fromkeys([*loop, *callers(trace, calls, np.arange(len(calls)))]))


def _recorded_forward(case: Case, trace: Trace) -> tuple[Finding, ...]:
    """Find models whose operators have numbers of autograd, but no backward in the step."""
    spans, _, unused = outermost_calls(trace)
    if not unused.any():
        return ()
    ops = trace.ops
    recorded = np.flatnonzero((ops.sequence >= 0) & (ops.forward_thread <= 0) & ~_nodes(trace))
    around = nest(spans).innermost(ops.thread[recorded], ops.start[recorded])
    idle = (around >= 0) & unused[around]
    idle &= _takes_numbers(around, ops.sequence[recorded])
    if not idle.any():
        return ()
    assert case.rows is not None
    rows, called = case.rows, np.zeros(len(case.rows.work), np.bool_)
    known = (rows.work.op_row >= 0) & rows.inside
    called[known] = np.isin(rows.work.op_row[known], recorded[idle])
    if _is_needless(case, called):
        return ()
    sizes = np.array([_elements(trace, row) for row in recorded.tolist()])
    return _finding(
        case,
        "a forward pass is recorded, and nothing goes back through it",
        float(sizes[idle].sum() / max(int(sizes.sum()), 1)),
        "torch.no_grad() around it; detach() behind it comes too late",
        "until its result is gone, all that its gradients would need is held",
        [f"called at {line}" for line in callers(trace, spans, np.unique(around[idle]))],
    )


def _is_needless(case: Case, mask: Mask) -> bool:
    """Whether most of this work is for nothing, or done again: its memory goes with it."""
    assert case.rows is not None
    needless = case.verdict(UNUSED + READ_ONLY + MADE_BEFORE)
    return case.rows.ms(mask & needless) > case.rows.ms(mask) / 2


def _takes_numbers(around: Ints, numbers: Ints) -> Mask:
    """Whether operators are in a call that takes several of autograd's numbers.

    What is not recorded, as frozen layers on data, is shown with the number that comes next.
    """
    calls, which = np.unique(around, return_inverse=True)
    distinct = [len(np.unique(numbers[around == call])) for call in calls]
    return (np.array(distinct, np.int64) > 1)[which]


def _elements(trace: Trace, row: int) -> int:
    """Return the elements of the largest tensor that an operator takes, which it may keep."""
    call = trace.op_call(row)
    return max(call.numels, default=0) if call is not None else 0


def _recorded_backward(case: Case, trace: Trace) -> tuple[Finding, ...]:
    ops, nodes = trace.ops, _nodes(trace)
    if _checkpoints(trace) or _transforms(trace):
        return ()  # the forward runs again there, and is recorded; torch.func always records
    node = nest(ops, nodes)
    inside = (node.innermost(ops.thread, ops.start) >= 0) & ~nodes
    inside &= trace.named(ops, lambda name: name.startswith("aten::"))
    numbered = inside & (ops.sequence >= 0) & (ops.forward_thread <= 0)
    makers = forward_ops(ops)
    makers = makers[makers >= 0]
    if not numbered.sum() > RECORDED * max(int(inside.sum()), 1) or inside[makers].any():
        return ()
    return _finding(
        case,
        "the backward pass is recorded, and nothing goes back through it",
        BY_RECORDING,
        "no create_graph=True in backward() or torch.autograd.grad()",
        "a recorded backward keeps all that its own gradients would need",
        [f"create_graph is given at {line}" for line in case.setup_lines("create_graph")],
    )


def _pools(case: Case) -> tuple[Finding, ...]:
    pools = case.run.profile.graph_pools if case.run and case.run.profile else ()
    memory = case.run.memory if case.run is not None else None
    spare = sum(pools) - max(pools, default=0)
    if memory is None or not spare > SHARE * memory.peak:
        return ()
    return (
        Finding(
            rule="graph_memory",
            claim=f"{len(pools)} CUDA graphs have a pool each: {units.bytes_(sum(pools))}",
            evidence=(f"the largest has {units.bytes_(max(pools))}",),
            remedy="capture the largest first and give its pool to the others: "
            "torch.cuda.graph(graph, pool=first.pool())",
            stake_bytes=spare,
            of_bytes=memory.reserved or memory.peak,
            why="one graph runs at a time, and all pools are held",
        ),
    )


def _finding(
    case: Case, claim: str, share: float, remedy: str, why: str, lines: list[str]
) -> tuple[Finding, ...]:
    memory = case.run.memory if case.run is not None else None
    if memory is None or not memory.peak:
        return ()
    held = int(share * max(0, memory.peak - memory.before))
    if held < SHARE * memory.peak:
        return ()
    return (
        Finding(
            rule="graph_memory",
            claim=f"{claim}: {units.bytes_(held)}",
            evidence=(f"the step's peak is {units.bytes_(memory.peak)}", *lines),
            remedy=remedy,
            stake_bytes=held,
            of_bytes=memory.peak,
            why=why,
        ),
    )


def _checkpoints(trace: Trace) -> bool:
    return bool(trace.named(trace.python, lambda name: "torch/utils/checkpoint.py" in name).any())


def _transforms(trace: Trace) -> bool:
    """Whether torch.func.grad or vjp runs, which drops what it has recorded when it returns."""
    transforms = "torch/_functorch/eager_transforms.py"
    return bool(trace.named(trace.python, lambda name: transforms in name).any())


def _nodes(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return trace.named(trace.ops, lambda name: name.startswith(AUTOGRAD_NODE))


RULE = check

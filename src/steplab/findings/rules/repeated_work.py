"""The step computes the same thing twice.

What it sees: operators whose result, or its transpose, the step had already computed from the same
inputs, as the Run recorded the flow of values: the forward again under checkpointing, also where a
compiled backward has products and attentions of its forward (the same operator on the same shapes
and strides, which no gradient has); a weight that is normalized or cast at every use, a mask or a
table in every layer; nodes of autograd that run twice, where two losses go back through one graph,
and gradients that a pass for each weight or loss computes again; weights that autocast casts again
and again; operators whose inputs are one sample, expanded to many, also lookups by such an index;
and operators that take each row by itself, of rows that `expand`, `repeat`, an index or windows
that overlap copied from fewer ones.
Why it costs: it is the same time once more.
Remedy: compute it once and keep it, or before it is copied; no checkpointing while there is room;
one backward of the sum.
When it is wrong: checkpointing makes room that is needed. It is reported where the step uses less
than half of the device's memory, and where it costs 10 % of the step: below that it may well pay.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.core.dataflow import BACKWARD_AGAIN, CAST_AGAIN, COPIED_ROWS, MADE_BEFORE, ROWS_COPIED
from steplab.core.run import MEMORY_BUDGET
from steplab.costs.op_call import OpCall, TensorArg
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.loops import python_loops
from steplab.findings.matmuls import attainable_rate, matmuls
from steplab.findings.rows import Mask, Rows, is_cast
from steplab.findings.rules._shared_lookups import shared_lookups
from steplab.trace.events import Codes, Ints
from steplab.trace.phases import AUTOGRAD_NODE
from steplab.trace.spans import nest

# Runs where a weight is given its gradient; what `torch.autograd.grad` returns ends before it.
ACCUMULATE = "torch::autograd::AccumulateGrad"
COMPILED_BACKWARD = f"{AUTOGRAD_NODE}: CompiledFunctionBackward"
LOG_SOFTMAX = "aten::_log_softmax"
PLENTY = 0.5  # of the device's memory in use
WORTH_IT = 0.10  # of the step
SHARE = 0.02
CASTS = 0.05  # less is the price of autocast
PRODUCTS = 0.2  # of gradients that are computed again, also where activations take most


def check(case: Case) -> tuple[Finding, ...]:
    """Tell recomputation in backward from repetition, and from a second backward."""
    rows = case.rows
    if rows is None:
        return ()
    again, cast = case.verdict(MADE_BEFORE + CAST_AGAIN), case.verdict(CAST_AGAIN)
    backward = rows.labeled("phase", lambda label: label == "backward")
    # Casts inside other operators are autocast's own.
    own = rows.called(is_cast) & ~rows.asked_for(_asks_for_cast)
    found = (
        _same_gradients(case, rows, case.verdict(BACKWARD_AGAIN)),
        _recomputed(case, rows, (again & backward) | _again_in_graphs(rows, backward)),
        _repeated(case, rows, again & ~backward & ~own, backward),
        _cast_again(case, rows, cast & ~backward & own),
        _copied_rows(case, rows) or _expanded(case, rows),
        _looked_up_again(case, rows),
        _second_backward(case, rows),
    )
    return tuple(finding for finding in found if finding is not None)


def _recomputed(case: Case, rows: Rows, mask: Mask) -> Finding | None:
    spent = case.cost_ms(mask)
    if not spent > WORTH_IT * case.step_ms or _is_scarce(case):
        return None
    return Claim(
        rule="repeated_work",
        claim=f"backward computes the forward again: {units.milliseconds(spent)} a step",
        evidence=(*_room(case), *_budget(case), *rows.hot_lines(mask)),
        remedy="no checkpointing (torch.utils.checkpoint, gradient_checkpointing_enable) while "
        "there is room for the activations, and of compiled code "
        "torch._functorch.config.activation_memory_budget = 1",
        stake_ms=spent,
        why="a checkpointed block runs twice, to save memory that is not short here",
        gain_ms=spent,
        work=mask,
    )


def _same_gradients(case: Case, rows: Rows, mask: Mask) -> Finding | None:
    """Judge gradients that one backward pass after another computes, from the same values."""
    spent, products = case.cost_ms(mask), rows.labeled("category", lambda name: "matmul" in name)
    # Passes for derivatives of derivatives share slopes of activations, and no gradient.
    if not spent > SHARE * case.step_ms or rows.ms(mask & products) < PRODUCTS * rows.ms(mask):
        return None
    ops = rows.work.op_row[mask & (rows.work.op_row >= 0)]
    at = rows.source.ops.start[ops]
    asked, calling = rows.lines_at(at), rows.lines_at(at, calling=True)
    return Claim(
        rule="repeated_work",
        claim=f"backward passes compute the same gradients again: {units.milliseconds(spent)} a "
        "step",
        evidence=(
            *(f"backward is called at {line}" for line in asked),
            *(f"in a function that is called at {line}" for line in calling),
            *rows.hot_lines(mask),
        ),
        remedy="one pass for all: loss.backward(), or torch.autograd.grad(loss, list(weights))",
        stake_ms=spent,
        why="every pass begins at the loss: what lies between it and the weights is the same",
        gain_ms=spent,
        work=mask,
    )


def _again_in_graphs(rows: Rows, backward: Mask) -> Mask:
    """Return products and attentions of the forward that compiled backwards run again.

    A compiler recomputes what is elementwise wherever that saves a read; this it must be told to.
    The gradients of a product are two products, which may look like one of the forward: that of
    the probabilities of an attention has the shapes of its scores. A third one is a repetition.
    """
    compiled = backward & rows.within(lambda call: call.name == COMPILED_BACKWARD)
    products = rows.labeled("category", lambda label: label.startswith("matmul"))
    large = rows.labeled("category", lambda label: label.startswith("attention"))
    if rows.count(products & compiled) > 2 * rows.count(products & ~backward):
        large |= products
    known = large & (rows.call < len(rows.calls) - 1)
    again = rows.of_calls(np.unique(rows.call[known & rows.inside & ~backward]))
    return again & known & compiled


def _budget(case: Case) -> list[str]:
    """Return the setting by which a compiler keeps less than it could, and where it is written."""
    budgets = [one for one in case.switches if one.startswith(MEMORY_BUDGET)]
    lines = case.setup_lines(MEMORY_BUDGET) if budgets else ()
    return [*budgets, *(f"{MEMORY_BUDGET} is set at {line}" for line in lines)]


def _repeated(case: Case, rows: Rows, mask: Mask, backward: Mask) -> Finding | None:
    if not mask.any():
        return None
    ops = [total.label for total in rows.totals("op", mask, 3)]
    # The gradient of something that is computed again is computed again as well, and may take far
    # longer: that of a lookup adds up rows. After a pass without gradients it is the only one.
    first = rows.of_calls(np.unique(rows.call[mask])) & ~mask & ~backward
    loops = [one for one in python_loops(rows) if _turns_again(rows, one.whole & ~backward, mask)]
    if not first.any() or _gradient_share(rows, first) >= _gradient_share(rows, mask) / 2:
        mask |= rows.with_gradients(rows.whole_calls(mask))
    spent = case.cost_ms(mask)
    if not spent > SHARE * case.step_ms:
        return None
    casts = rows.ms(mask & rows.called(is_cast)) > rows.ms(mask) / 2
    return Claim(
        rule="repeated_work",
        claim=f"the same values are computed again: {units.milliseconds(spent)} a step",
        evidence=(
            f"{', '.join(ops)}, from the same inputs",
            *rows.hot_lines(mask, calling_first=True),
        ),
        remedy=_once(ops, casts=casts, in_loop=bool(loops)),
        stake_ms=spent,
        why="inputs and results are those of an earlier operator of the step",
        gain_ms=spent,
        ordinary=casts and not spent > CASTS * case.step_ms,
        work=mask,
        # A loop of which most turns compute what others have is that long for this reason.
        is_cause=bool(loops),
    )


def _once(ops: list[str], *, casts: bool, in_loop: bool) -> str:
    """Return how to compute something once."""
    if casts:
        return "cast it once, before its first use: autocast casts it again for every product"
    if in_loop:
        return (
            "compute each of them once before the loop, all in one go, and let its turns pick from "
            "the results"
        )
    if LOG_SOFTMAX in ops[:1]:
        return (
            "one F.log_softmax for all that reads it: F.nll_loss of it instead of F.cross_entropy "
            "beside it, or label_smoothing= of F.cross_entropy"
        )
    return (
        "compute it once and pass it on: a buffer for tables and masks, "
        "torch.nn.utils.parametrize.cached() for weights, .mT for a product or a torch.cdist of "
        "the same two in the other order"
    )


def _turns_again(rows: Rows, loop: Mask, again: Mask) -> bool:
    """Whether most of what a loop calls computes what was computed before."""
    return rows.count(loop & again) > rows.count(loop) / 2


def _gradient_share(rows: Rows, mask: Mask) -> float:
    """Return the part of some work that backward computes gradients for."""
    spent = rows.ms(mask)
    return rows.ms(rows.differentiated(mask)) / spent if spent else 0.0


def _copied_rows(case: Case, rows: Rows) -> Finding | None:
    """Find operators that compute each of many rows that are copies of fewer."""
    masks = {
        2**power: rows.with_gradients(case.verdict(letter))
        for power, letter in enumerate(COPIED_ROWS, 1)
    }
    costs = {times: case.cost_ms(mask) for times, mask in masks.items()}
    lost = sum((1 - 1 / times) * cost for times, cost in costs.items())
    if not lost > SHARE * case.step_ms:
        return None
    mask = np.logical_or.reduce(list(masks.values()))
    spent, most = case.cost_ms(mask), max(costs, key=costs.__getitem__)
    often = "about twice or more" if most == 2 else f"{most} times or more"
    makers = rows.totals("line", case.verdict(ROWS_COPIED), 1)
    return Claim(
        rule="repeated_work",
        claim=f"each row is computed {often}: {units.milliseconds(spent)} a step",
        evidence=(
            "its input has copies of fewer rows, by expand, repeat, an index or overlapping windows"
            + "".join(f", made at {total.label}" for total in makers),
            *rows.hot_lines(mask),
        ),
        remedy="compute the rows before they are copied: layer(x).repeat_interleave(n, 0) instead "
        "of layer(x.repeat_interleave(n, 0)), layer(x)[index] instead of layer(x[index]), "
        "layer(x).unfold(...) instead of layer(x.unfold(...)); what is added to them later "
        "broadcasts",
        stake_ms=spent,
        why="every operator on the way takes each row by itself, and equal rows give equal results",
        gain_ms=lost,
        work=mask,
    )


def _expanded(case: Case, rows: Rows) -> Finding | None:
    """Find operators that compute one thing for every sample, as all samples share it."""
    sizes = {n: size for n, call in enumerate(rows.calls) if (size := _shared_by(call)) > 1}
    light = rows.category("elementwise", "copy", "reduction", "memset")
    forward = rows.labeled("phase", lambda label: label != "backward")
    mask = rows.of_calls(sizes) & forward & ~light
    if not case.cost_ms(mask) > SHARE * case.step_ms:  # views of what is expanded take nothing
        return None
    mask = rows.with_gradients(mask)
    spent = case.cost_ms(mask)
    most = max(sizes.values())
    return Claim(
        rule="repeated_work",
        claim=f"one thing is computed for each of {most} samples: {units.milliseconds(spent)}",
        evidence=("its inputs are expanded: all samples are the same", *rows.hot_lines(mask)),
        remedy="compute it once without the dimension of samples, and expand the result",
        stake_ms=spent,
        why="an expanded tensor holds one sample, and an operator takes it for many",
        gain_ms=spent * (1 - 1 / most),
        work=mask,
    )


def _looked_up_again(case: Case, rows: Rows) -> Finding | None:
    """Judge lookups of the same rows for every sample, and the products with each of the copies."""
    found = shared_lookups(rows)
    if found is None:
        return None
    mask = found.lookups | found.products
    spent = case.cost_ms(mask)
    best = attainable_rate(case, rows.of_calls(matmuls(rows)))
    flops = float(np.nansum(rows.work.flops[found.products])) / rows.steps
    left = case.cost_ms(found.lookups) / found.times + (flops / best if best else 0.0)
    if not spent - left > SHARE * case.step_ms:
        return None
    return Claim(
        rule="repeated_work",
        claim=f"the same rows are looked up for each of {found.times:,} samples: "
        f"{units.milliseconds(spent)} a step",
        evidence=("the index is expanded: all samples have the same", *rows.hot_lines(mask)),
        remedy="look them up once, without the dimension of samples: what is added to them "
        "broadcasts, and one product takes them all, samples @ rows.T instead of one for each "
        "sample",
        stake_ms=spent,
        why="a lookup writes a copy for every sample, and its gradient adds up as many",
        gain_ms=spent - left,
        work=mask,
    )


def _shared_by(call: OpCall) -> int:
    """Return for how many samples an operator computes the same; 1: it does not."""
    tensors = [t for t in call.tensors if t is not None and len(t.dims) > 2]
    return min(t.dims[0] for t in tensors) if tensors and all(map(_is_one_sample, tensors)) else 1


def _is_one_sample(tensor: TensorArg) -> bool:
    """Whether a tensor is one sample, expanded to many.

    A number that is expanded to all elements is the gradient of a mean, and no sample.
    """
    strides = tensor.strides or ()  # older traces have none
    return any(strides) and strides[0] == 0


def _cast_again(case: Case, rows: Rows, mask: Mask) -> Finding | None:
    """Judge weights that autocast casts again, beyond what micro-batches or two models would."""
    if not case.cost_ms(mask) > CASTS * case.step_ms:
        return None
    # The operator that needs the cast has gradients of its own.
    mask = rows.with_gradients(mask) & rows.called(is_cast)
    spent = case.cost_ms(mask)
    return Claim(
        rule="repeated_work",
        claim=f"autocast casts the same weights again: {units.milliseconds(spent)} a step",
        evidence=(f"{rows.count(mask):.0f} casts a step", *rows.hot_lines(mask)),
        remedy="enter torch.autocast once, around the whole forward: it keeps what it has cast "
        "until it is left",
        stake_ms=spent,
        why="autocast forgets its copies of the weights whenever it is left",
        gain_ms=spent,
        work=mask,
    )


def _second_backward(case: Case, rows: Rows) -> Finding | None:
    """Find nodes of autograd that run more than once, where weights get gradients from the first.

    `torch.autograd.grad` gives them to nobody else: its passes are for gradients of their own.
    """
    ops = rows.source.ops
    nodes = np.flatnonzero(rows.source.named(ops, lambda name: name.startswith(AUTOGRAD_NODE)))
    to_weights = ops.start[rows.source.named(ops, ACCUMULATE.__eq__)]
    numbered = nodes[ops.sequence[nodes] >= 0]
    key = np.stack([ops.sequence[numbered], ops.forward_thread[numbered], ops.name[numbered]])
    _, first, which = np.unique(key, axis=1, return_index=True, return_inverse=True)
    later = np.zeros(len(numbered), np.bool_)
    begun, begun_first = ops.start[numbered], ops.start[numbered[first[which.ravel()]]]
    # A pass that began before the weights got their gradients gives them itself.
    since_pass = _pass_began(ops.thread[numbered], begun, ops.sequence[numbered])
    turn = _turns(which.ravel(), begun)
    for number in range(1, int(turn.max(initial=0)) + 1):
        again = turn == number
        since, until = begun_first[again].min(), since_pass[again].min()
        later |= again & bool(((to_weights > since) & (to_weights < until)).any())
    if not later.any():
        return None
    chosen = np.zeros(len(ops), np.bool_)
    chosen[numbered[later]] = True
    mask: Mask = np.zeros(len(rows.work), np.bool_)
    has_op = (rows.work.op_row >= 0) & rows.inside
    op = rows.work.op_row[has_op]
    mask[has_op] = nest(ops, chosen).innermost(ops.thread[op], ops.start[op]) >= 0
    spent = case.cost_ms(mask)
    if not spent > SHARE * case.step_ms:
        return None
    return Claim(
        rule="repeated_work",
        claim=f"one graph is gone back through twice: {units.milliseconds(spent)} a step",
        evidence=(
            f"{int(later.sum())} nodes of autograd run again",
            *(f"backward is called at {line}" for line in rows.lines_at(begun[later])),
            *rows.hot_lines(mask),
        ),
        remedy="add the losses and call backward once, without retain_graph=True",
        stake_ms=spent,
        why="gradients of a sum cost one pass, those of two losses two",
        gain_ms=spent,
        work=mask,
    )


def _pass_began(thread: Codes, begun: Ints, sequence: Ints) -> Ints:
    """Return when the backward pass of each node began: it takes the last nodes first."""
    order = np.lexsort((begun, thread))
    same = np.diff(thread[order], prepend=-1) == 0
    goes_on = same & (np.diff(sequence[order], prepend=0) < 0)
    first = np.maximum.accumulate(np.where(goes_on, 0, np.arange(len(order))))
    found = np.zeros_like(begun)
    found[order] = begun[order][first]
    return found


def _turns(node: Ints, begun: Ints) -> Ints:
    """Return how often the node of each execution had run before."""
    order = np.lexsort((begun, node))
    starts = np.flatnonzero(np.diff(node[order], prepend=-1))
    turn = np.zeros(len(node), np.int64)
    turn[order] = np.arange(len(node)) - np.repeat(starts, np.diff(np.append(starts, len(node))))
    return turn


def _is_scarce(case: Case) -> bool:
    peak = case.run.memory.peak if case.run is not None and case.run.memory is not None else None
    return bool(peak and case.capacity_bytes and peak > PLENTY * case.capacity_bytes)


def _room(case: Case) -> list[str]:
    memory = case.run.memory if case.run is not None else None
    if memory is None or not case.capacity_bytes:
        return []
    room = units.bytes_(case.capacity_bytes)
    return [f"the step's peak is {units.bytes_(memory.peak)} of {room}"]


def _asks_for_cast(name: str) -> bool:
    return name in ("aten::to", "aten::_to_copy", "aten::type_as", "aten::copy_")


RULE = check

"""What never changes is computed again in every step: a mask, a table, a frozen network's results.

What it sees: operators that depend on no weight, no batch and no random number, or on nothing that
two steps in a row did not find as it was, as the Run recorded the flow of values. Without that
record: triangles (`tril`, `triu`) and comparisons of positions in the forward pass, and what the
same function then does with tensors of that size.
Why it costs: a mask of queries x keys is written, inverted and cast again, often in every layer; a
frozen text tower encodes the same prompts.
Remedy: build it once, as a buffer of the module; or none at all (`is_causal=True`).
When it is wrong: the mask depends on the batch, as with documents of different lengths; or the loop
gives one batch again and again, of which others would follow: then it tells from 10 % on.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.core.dataflow import CONSTANT, UNCHANGED
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows
from steplab.trace.analysis import UNATTRIBUTED

SHARE = 0.01
SAME_BATCH = 0.10  # of the step, where nothing new is read
MIN_LENGTH = 64  # queries or keys
TRIANGLES = ("aten::tril", "aten::triu", "aten::tril_", "aten::triu_")
COMPARISONS = tuple(f"aten::{name}" for name in ("ge", "gt", "le", "lt", "eq", "ne", "sub"))
WHOLE_NUMBERS = ("long int", "int", "long")


def check(case: Case) -> Finding | None:
    """Add up what needs no step to be made."""
    rows = case.rows
    if rows is None:
        return None
    dataflow = case.dataflow
    mask = _by_flow(case, dataflow.fresh) if dataflow is not None else _by_shape(rows)
    spent = case.cost_ms(mask)
    if not spent > SHARE * case.step_ms:
        return None
    return Claim(
        rule="constant_rebuilt",
        claim=f"what is the same in every step is computed again: {units.milliseconds(spent)}",
        evidence=(*_masks(rows), *rows.hot_lines(mask)),
        remedy="compute it once, before the loop or as a buffer of the module; for the causal "
        "mask, is_causal=True instead",
        stake_ms=spent,
        why="it depends on no weight that is trained and on no batch",
        gain_ms=spent,
        work=mask,
    )


def _by_flow(case: Case, fresh: bool) -> Mask:
    """Return what depends on nothing that changes; where all batches are one, only if it is much.

    Then what is computed of the batch alone would be the same in every step, too. What a formula of
    autograd makes for itself, such as indices, nobody can keep.
    """
    assert case.rows is not None
    asked = ~case.rows.labeled("phase", lambda label: label == "backward")
    never, unchanged = case.verdict(CONSTANT) & asked, case.verdict(UNCHANGED) & asked
    much = case.cost_ms(unchanged) > SAME_BATCH * case.step_ms
    return never | unchanged if fresh or much else never


def _masks(rows: Rows) -> list[str]:
    sizes = sorted(_sizes(rows))[:2]
    return [f"masks of {', '.join(f'{size:,}' for size in sizes)} elements"] if sizes else []


def _by_shape(rows: Rows) -> Mask:
    """Return what makes masks of positions, judged by names and shapes."""
    sizes = _sizes(rows)
    forward = rows.labeled("phase", lambda label: label not in ("backward", "optimizer", "data"))
    made = forward & rows.called(lambda call: _mask_size(call) in sizes)
    functions = {total.label for total in rows.totals("function", made, most=50)} - {UNATTRIBUTED}
    beside = rows.labeled("function", lambda label: label in functions)
    beside &= rows.called(lambda call: max(call.numels, default=0) in sizes)
    return made | (forward & beside)


def _sizes(rows: Rows) -> set[int]:
    return {size for call in rows.calls if (size := _mask_size(call))}


def _mask_size(call: OpCall) -> int:
    """Return the elements of the mask that a call makes from positions; 0 if it makes none."""
    first = call.tensor(0)
    if first is None or len(first.dims) < 2:
        return 0
    if call.name in TRIANGLES:
        return first.numel if min(first.dims[-2:]) >= MIN_LENGTH else 0
    second = call.tensor(1)
    if call.name not in COMPARISONS or second is None or not second.dims:
        return 0
    if first.dtype not in WHOLE_NUMBERS or second.dtype not in WHOLE_NUMBERS:
        return 0
    # A column against a row: (T, 1) and (T) or (1, T).
    column, row = sorted((first, second), key=lambda one: one.dims[-1])
    if column.dims[-1] != 1 or len(column.dims) < 2 or row.numel != row.dims[-1]:
        return 0
    large = min(column.dims[-2], row.dims[-1]) >= MIN_LENGTH
    return column.numel * row.numel if large and column.numel == column.dims[-2] else 0


RULE = check

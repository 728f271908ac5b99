"""Much of the batch is padding.

What it sees: what the batch's mask or lengths leave out, token ids that repeat the last one of
their row up to its end, or frames of zeros one after the other, which the first layer takes, as the
Run recorded them: more than a quarter of the batch. Where a graph is replayed, ids that fill a part
of its input.
Why it costs: padding goes through every layer like any other token.
Remedy: pad to the longest of the batch and not to a fixed length, sort by length, or pack several
sequences into one row.
When it is wrong: rows end in a token that is repeated and counts.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.rows import Rows

SHARE = 0.25
# What must change with the batches, where a mask keeps padding out of the attention.
PACKING = ", with positions that begin anew and a mask that keeps the sequences apart"
WHOLE_NUMBERS = ("long int", "int", "long")


def check(case: Case) -> Finding | None:
    """Take the share of padding of what forward and backward cost."""
    rows = case.rows
    if rows is None:
        return None
    dataflow = case.dataflow
    masked = case.run.work.padding if case.run and case.run.work else 0.0
    padding = dataflow.padding if dataflow is not None else _static_padding(case, rows)
    padding = masked or padding  # a mask or lengths are exact
    if not padding > SHARE:
        return None
    spent = case.cost_ms(rows.labeled("phase", lambda label: label != "optimizer"))
    lost = padding * spent
    written = rows.called(lambda call: _unfilled(call) > 0)
    return Finding(
        rule="padded_batch",
        claim=f"{units.percent(padding)} of the tokens or frames are padding",
        evidence=(
            f"forward and backward take {units.milliseconds(spent)}",
            *(rows.hot_lines(written, 1) if dataflow is None else ()),
        ),
        remedy="pad to the longest of the batch instead of a fixed length, group sequences of one "
        "length, or pack several into a row" + (PACKING if masked else ""),
        stake_ms=lost,
        why="padding goes through every layer like any other token",
        gain_ms=lost,
    )


def _static_padding(case: Case, rows: Rows) -> float:
    """Return the unused share of the input of a replayed graph, by what is copied into it."""
    assert case.analysis is not None
    if not (case.analysis.trace.device.graph > 0).any():
        return 0.0
    return max((_unfilled(call) for call in rows.calls), default=0.0)


def _unfilled(call: OpCall) -> float:
    """Return the share of its rows that a copy of ids into a larger buffer leaves unwritten."""
    target = call.tensor(0)
    if call.name != "aten::copy_" or target is None or len(target.dims) != 2:
        return 0.0
    if target.dtype not in WHOLE_NUMBERS or not target.strides or target.dims[0] < 2:
        return 0.0
    return max(0.0, 1 - target.dims[1] / max(target.strides[0], 1))


RULE = check

"""Tensors are cast back and forth, or meet a norm of another dtype.

What it sees: copies between fp32 and a 16-bit dtype; norms whose input and weight differ in dtype,
which torch therefore computes op by op.
Why it costs: a cast reads and writes the whole tensor and computes nothing; a norm of mixed dtypes
takes five kernels instead of one.
Remedy: keep the residual stream in the dtype of the norms, drop explicit casts, or compile.
When it is wrong: under autocast every weight, its gradient and the input of every product are cast:
10 to 24 % of a clean eager step on an H200. That is the price of running op by op, and a note. A
fault is a cast that the code asks for, of values that had that dtype before.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.core.dataflow import CAST_BACK
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import FLOATS, Mask, Rows, is_cast
from steplab.trace.analysis import UNATTRIBUTED

SHARE = 0.10
BACK_AND_FORTH = 0.05  # of the step
ASKED = ("aten::to", "aten::_to_copy", "aten::type_as", "aten::copy_", "aten::type")
# Squaring, scaling and weighting each move the tensor once; a fused norm moves it once in all.
UNFUSED = 2 / 3
NORMS = ("aten::rms_norm", "aten::layer_norm")


def check(case: Case) -> Finding | None:
    """Add up the casts and the norms of mixed dtypes."""
    rows = case.rows
    if rows is None:
        return None
    casts, norms = rows.called(is_cast), _mixed_norms(rows)
    both = casts | norms
    spent = rows.ms(both)
    if not spent > SHARE * case.step_ms:
        return None
    asked = casts & rows.asked_for(lambda name: name in ASKED)
    watched = case.dataflow is not None
    back = asked & case.verdict(CAST_BACK) if watched else asked
    evidence = [f"{rows.count(casts):.0f} casts a step, {units.milliseconds(rows.ms(casts))}"]
    if norms.any():
        evidence.append(f"norms of mixed dtypes: {units.milliseconds(rows.ms(norms & ~casts))}")
    return Claim(
        rule="autocast_casts",
        claim=f"changes of dtype take {units.milliseconds(spent)} a step",
        evidence=(*evidence, *rows.hot_lines(both)),
        remedy="keep the stream in one dtype and norm weights in that dtype, or compile=blocks",
        stake_ms=spent,
        why="a cast reads and writes a whole tensor and computes nothing",
        gain_ms=rows.ms(casts) + UNFUSED * rows.ms(norms & ~casts),
        work=both,
        ordinary=not rows.ms(back) > BACK_AND_FORTH * case.step_ms,
    )


def _mixed_norms(rows: Rows) -> Mask:
    """Return norms whose weight has another dtype, with their backward where modules are known."""
    mixed = rows.within(_is_mixed_norm)
    modules = {g.label for g in rows.totals("module", mixed, most=1000)} - {UNATTRIBUTED}
    # A norm without a module of its own would count everything in the module around it.
    own = {name for name in modules if "norm" in name.lower()}
    return mixed | rows.labeled("module", lambda label: label in own)


def _is_mixed_norm(call: OpCall) -> bool:
    if call.name not in NORMS:
        return False
    dtypes = {tensor.dtype for tensor in call.tensors if tensor is not None}
    return len(dtypes.intersection(FLOATS)) > 1


RULE = check

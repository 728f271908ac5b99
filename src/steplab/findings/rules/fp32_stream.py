"""A model of 16-bit weights carries its activations in fp32.

What it sees: 16-bit products whose weights are stored in 16 bits, and sums of a 16-bit and an fp32
tensor as large as their inputs or outputs.
Why it costs: the sum of both is fp32, and so is everything after it, up to the end of the model:
twice the bytes, and a cast before every product.
Remedy: cast back where fp32 begins, as behind a norm that computes in fp32.
When it is wrong: the residual stream is fp32 on purpose. With fp32 weights under autocast it is so
by design, and nothing is said.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import matmuls
from steplab.findings.rows import Rows, is_cast

HALVES = ("c10::BFloat16", "c10::Half")
SUMS = ("aten::add", "aten::add_", "aten::mul", "aten::mul_", "aten::sub")
MOVES = ("elementwise", "normalization", "reduction", "copy", "other")
MIN_ELEMENTS = 4096


def check(case: Case) -> Finding | None:
    """Add up the fp32 work on tensors of the stream's size."""
    rows = case.rows
    sizes = _stream_sizes(rows) if rows is not None else set()
    if rows is None or not sizes or _casts_weights(rows):
        return None
    widening = rows.called(lambda call: call.name in SUMS and _mixes(call, sizes))
    if not widening.any():
        return None
    wide = rows.called(lambda call: _has(call, sizes, ("float",))) & rows.category(*MOVES)
    casts = wide & rows.called(is_cast)
    forward = rows.labeled("phase", lambda label: label != "backward")
    widened = casts & forward & rows.called(_widens)
    spent = rows.ms(wide)
    return Claim(
        rule="fp32_stream",
        claim=f"activations of a 16-bit model are fp32: {units.milliseconds(spent)} around them",
        evidence=(
            f"{rows.count(widening):.0f} sums a step of a 16-bit and an fp32 tensor",
            *(f"fp32 meets 16 bits at {line}" for line in rows.hot_lines(widening, 2)),
            *(f"cast to fp32 at {line}" for line in rows.hot_lines(widened, 2)),
            f"{rows.count(casts):.0f} casts a step, {units.milliseconds(rows.ms(casts))}",
        ),
        remedy="cast back to the model's dtype where fp32 begins: norm(x.float()).to(x.dtype)",
        stake_ms=spent,
        why="what is added to fp32 becomes fp32: twice the bytes, and a cast before each product",
        gain_ms=rows.ms(casts) + rows.ms(wide & ~casts) / 2,
        work=wide,
    )


def _stream_sizes(rows: Rows) -> set[int]:
    """Return the elements of inputs and outputs of the 16-bit products with a weight."""
    sizes = set()
    for one in matmuls(rows).values():
        if one.left.dtype in HALVES and one.batch == 1:
            sizes |= {one.m * one.k, one.m * one.n}
    return {size for size in sizes if size >= MIN_ELEMENTS}


def _casts_weights(rows: Rows) -> bool:
    """Whether weights of products are cast to 16 bits in the step: then they are stored in fp32."""
    weights = {one.k * one.n for one in matmuls(rows).values() if one.right.dtype in HALVES}
    inputs = {one.m * one.k for one in matmuls(rows).values()}
    casts = (call.tensor(0) for call in rows.calls if is_cast(call))
    into = [tensor for tensor in casts if tensor is not None and tensor.dtype in HALVES]
    return any(tensor.numel in weights - inputs for tensor in into)


def _mixes(call: OpCall, sizes: set[int]) -> bool:
    return _has(call, sizes, ("float",)) and _has(call, sizes, HALVES)


def _widens(call: OpCall) -> bool:
    target = call.tensor(0)
    return target is not None and target.dtype == "float"


def _has(call: OpCall, sizes: set[int], dtypes: tuple[str, ...]) -> bool:
    return any(t is not None and t.dtype in dtypes and t.numel in sizes for t in call.tensors)


RULE = check

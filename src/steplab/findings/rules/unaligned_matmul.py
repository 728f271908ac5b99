"""Matrix products whose rows do not begin on the tensor cores' grid.

What it sees: 16-bit products with rows that are no multiple of 16 bytes.
Why it costs: cuBLAS then takes kernels with narrow loads, or none of the tensor cores' best.
Remedy: pad the dimension (a vocabulary of 50,257 to 50,304) and ignore the rest.
When it is wrong: products so small that their time is nothing but the launch.
"""

from __future__ import annotations

from steplab.core import Finding
from steplab.costs.op_call import TensorArg
from steplab.findings.case import Case
from steplab.findings.matmuls import Matmul, attainable_rate, flop_rate, matmuls

ROW_BYTES = 16
SMALLEST = 64  # below this a product is a matter of launches
HALVES = {"c10::BFloat16": "bf16", "c10::Half": "fp16"}


def check(case: Case) -> Finding | None:
    """Compare the rate of products off the grid with that of products on it."""
    rows = case.rows
    if rows is None or not case.on_device:
        return None
    half = {n: one for n, one in matmuls(rows).items() if one.left.dtype in HALVES and _large(one)}
    crooked = {number: one for number, one in half.items() if _off_grid(one)}
    mask = rows.of_calls(crooked)
    if not mask.any():
        return None
    spent, reached = rows.ms(mask), flop_rate(rows, mask)
    dtype = HALVES[next(iter(crooked.values())).left.dtype]
    best = attainable_rate(case, rows.of_calls(set(half) - set(crooked)), dtype)
    lost = spent * max(0.0, 1 - reached / best) if best and reached else None
    sizes = sorted({size for one in crooked.values() for size in _off_grid(one)})
    return Finding(
        rule="unaligned_matmul",
        claim=f"products with rows of {', '.join(map(str, sizes[:3]))} elements are off the grid",
        evidence=(*_shapes(crooked), *rows.hot_lines(mask)),
        remedy=f"pad {sizes[0]} to {-(-sizes[0] // 64) * 64}",
        stake_ms=spent,
        why=f"rows that are no multiple of {ROW_BYTES} bytes are loaded in narrow pieces",
        gain_ms=lost,
    )


def _large(one: Matmul) -> bool:
    return min(one.m, one.n, one.k) >= SMALLEST


def _off_grid(one: Matmul) -> set[int]:
    """Lengths of rows, in elements, that are no multiple of 16 bytes."""
    rows = {_row(one.left), _row(one.right), one.n}
    return {length for length in rows if length * one.left.item % ROW_BYTES}


def _row(tensor: TensorArg) -> int:
    """Elements from one row (or column) to the next in memory."""
    if not tensor.strides:
        return tensor.dims[-1]
    return max(tensor.strides[-2:])


def _shapes(crooked: dict[int, Matmul]) -> list[str]:
    texts = {f"({o.m} x {o.k}) by ({o.k} x {o.n})" for o in crooked.values()}
    return sorted(texts)[:3]


RULE = check

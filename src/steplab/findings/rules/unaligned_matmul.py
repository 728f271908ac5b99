"""Rows of matrix products are not aligned to what tensor cores load at once.

What it sees: 16-bit products with rows that are not a multiple of 16 bytes.
Why it costs: cuBLAS then picks kernels with narrow loads, not the best ones for tensor cores.
Remedy: pad the dimension (a vocabulary of 50,257 to 50,304) and ignore the padding.
When it is wrong: products so small that launching takes all their time.
"""

from __future__ import annotations

from steplab.core import Finding
from steplab.costs.op_call import TensorArg
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import Matmul, attainable_rate, flop_rate, matmuls

ROW_BYTES = 16
MIN_SIZE = 64  # smaller products are dominated by their launch
HALVES = {"c10::BFloat16": "bf16", "c10::Half": "fp16"}


def check(case: Case) -> Finding | None:
    """Compare the rate of unaligned products with that of aligned ones."""
    rows = case.rows
    if rows is None or not case.on_device:
        return None
    half = {n: one for n, one in matmuls(rows).items() if one.left.dtype in HALVES and _large(one)}
    unaligned = {number: one for number, one in half.items() if _unaligned_rows(one)}
    mask = rows.of_calls(unaligned)
    if not mask.any():
        return None
    spent, reached = rows.ms(mask), flop_rate(rows, mask)
    dtype = HALVES[next(iter(unaligned.values())).left.dtype]
    best = attainable_rate(case, rows.of_calls(set(half) - set(unaligned)), dtype)
    lost = spent * max(0.0, 1 - reached / best) if best and reached else None
    sizes = sorted({size for one in unaligned.values() for size in _unaligned_rows(one)})
    return Claim(
        rule="unaligned_matmul",
        claim=f"products with rows of {', '.join(map(str, sizes[:3]))} elements are off the grid",
        evidence=(*_shapes(unaligned), *rows.hot_lines(mask)),
        remedy=f"pad {sizes[0]} to {-(-sizes[0] // 64) * 64}",
        stake_ms=spent,
        why=f"rows that are no multiple of {ROW_BYTES} bytes are loaded in narrow pieces",
        gain_ms=lost,
        work=mask,
    )


def _large(one: Matmul) -> bool:
    return min(one.m, one.n, one.k) >= MIN_SIZE


def _unaligned_rows(one: Matmul) -> set[int]:
    """Return the lengths of rows, in elements, that are not a multiple of 16 bytes."""
    rows = {_row(one.left), _row(one.right), one.n}
    return {length for length in rows if length * one.left.item % ROW_BYTES}


def _row(tensor: TensorArg) -> int:
    """Return the elements from one row (or column) to the next in memory."""
    if not tensor.strides:
        return tensor.dims[-1]
    return max(tensor.strides[-2:])


def _shapes(unaligned: dict[int, Matmul]) -> list[str]:
    texts = {f"({o.m} x {o.k}) by ({o.k} x {o.n})" for o in unaligned.values()}
    return sorted(texts)[:3]


RULE = check

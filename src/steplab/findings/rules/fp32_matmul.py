"""Matrix products run on the plain fp32 units of a card that has tensor cores.

What it sees: kernels of fp32 products (SIMT) on a card with a tf32 or fp16 peak, but those whose
bytes take longer than their arithmetic: the distances of points in space by `torch.cdist`.
Why it costs: the fp32 units of an H200 reach 67 TFLOP/s, its tensor cores 495 in tf32.
Remedy: `precision=bf16`, or `precision=tf32` where the inputs must stay fp32; `precision=fp16` on a
card that has neither (V100, T4).
When it is wrong: a product needs all 24 bits (an fp32 router is small and stays a note).
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows
from steplab.hardware.catalog import Card
from steplab.trace.kernel_table import short_kernel_name

BY_PREFERENCE = ("bf16", "tf32", "fp16")


def check(case: Case) -> Finding | None:
    """Add up the time of fp32 products."""
    rows, card = case.rows, case.card
    if rows is None or not case.on_device or card is None:
        return None
    slow, fast = card.peak("fp32"), card.peak("tf32") or card.peak("fp16")
    if slow is None or fast is None or fast <= slow:
        return None
    mask = rows.category("matmul fp32 simt") & ~_waits_for_bytes(rows, slow, card)
    if not mask.any():
        return None
    spent = rows.ms(mask)
    kernels = [
        f"{short_kernel_name(g.label)}: {g.count:.0f}, {units.milliseconds(g.ms)}"
        for g in rows.totals("name", mask)
    ]
    return Claim(
        rule="fp32_matmul",
        claim=f"{rows.count(mask):.0f} fp32 products a step take {units.milliseconds(spent)}",
        evidence=(*kernels, *rows.hot_lines(mask, 2)),
        remedy=" or ".join(f"precision={dtype}" for dtype in _dtypes(card)),
        stake_ms=spent,
        why=f"the {card.name} multiplies at {fast:g} TFLOP/s with tensor cores, {slow:g} without",
        gain_ms=spent * _gain(rows, mask, slow / fast, card),
        work=mask,
    )


def _waits_for_bytes(rows: Rows, slow: float, card: Card) -> Mask:
    """Return the work whose least bytes take longer than its FLOPs on the fp32 units."""
    flops, moved = rows.work.flops, rows.work.bytes  # NaN where unknown
    mask: Mask = moved / card.bandwidth_gbs > flops / (1e3 * slow)  # ns
    return mask


def _gain(rows: Rows, mask: Mask, ratio: float, card: Card) -> float:
    """Return the share of the time that is gained; no product is faster than its bytes."""
    spent, moved = rows.work.duration[mask], rows.work.bytes[mask]
    least = np.nan_to_num(moved) / card.bandwidth_gbs  # ns
    return max(0.0, 1 - float(np.maximum(spent * ratio, least).sum() / spent.sum()))


def _dtypes(card: Card) -> list[str]:
    """Return two dtypes that the card multiplies fast, the better one first."""
    return [dtype for dtype in BY_PREFERENCE if card.peak(dtype)][:2]


RULE = check

"""Adding 0.01 a thousand times: which sums drift, and which stop growing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steplab.record import Column, Table
from steplab.techniques.precision import TORCH_NAMES

if TYPE_CHECKING:
    import torch

STEPS = 1000
INCREMENT = 0.01
EXACT = 10.0

SUMMED_NAMES = TORCH_NAMES | {"fp32": "float32", "fp64": "float64"}
# (accumulator, increment, cast): `cast` widens the increment before the addition.
CASES = (
    ("fp32", "fp32", False),
    ("fp16", "fp16", False),
    ("fp32", "fp16", False),
    ("fp32", "fp16", True),
    ("bf16", "bf16", False),
    ("fp32", "bf16", False),
    ("fp64", "fp64", False),
)
COLUMNS = (
    *map(Column, ("accumulator", "increment")),
    Column("result", digits=6),
    *map(Column, ("error", "stalls at step")),
)


def accumulation(device: torch.device) -> Table:
    """Return one row per pair of dtypes: the sum, its signed error, where it stopped growing."""
    rows = []
    for accumulator, increment, cast in CASES:
        result, stall = accumulate(accumulator, increment, cast, device)
        shown = f"{increment} cast to {accumulator}" if cast else increment
        rows.append((accumulator, shown, result, result - EXACT, stall or "none"))
    return Table(
        f"accumulation: {INCREMENT} added {STEPS:,} times (exact: {EXACT:g})",
        COLUMNS,
        tuple(rows),
        "error: result - 10. An fp32 sum of 16-bit increments is off only by the rounding of 0.01 "
        "itself.\nA sum stalls once the increment is less than half the gap to the next number: "
        "bf16 keeps 8 bits of\nsignificand, so from 4.0 on its gap is 0.03125.",
    )


def accumulate(
    accumulator: str, increment: str, cast: bool, device: torch.device
) -> tuple[float, int | None]:
    """Return the sum, and the first step (from 1) at which adding changed nothing, or None."""
    import torch

    total = torch.zeros((), dtype=getattr(torch, SUMMED_NAMES[accumulator]), device=device)
    addend = torch.tensor(INCREMENT, dtype=getattr(torch, SUMMED_NAMES[increment]), device=device)
    if cast:
        addend = addend.to(total.dtype)
    totals = [total.clone()]
    for _ in range(STEPS):
        total += addend  # in place: the accumulator keeps its dtype
        totals.append(total.clone())
    stacked = torch.stack(totals)
    still = (stacked[1:] == stacked[:-1]).nonzero()
    return total.item(), int(still[0]) + 1 if len(still) else None

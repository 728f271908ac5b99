"""Every expert multiplies its few tokens by itself.

What it sees: many products with weights of one shape in one loop, each on a part of the tokens,
which an index, a sort or the like has chosen; together with the work around them they reach less
than half the rate of large products. On a CPU the products alone do, each as fast as the fastest of
its shapes: some wait for a core, and what is around them stays.
Why it costs: a product of few rows does not fill the tensor cores, or the time of its own launch.
Remedy: sort the tokens by expert and multiply all groups in one call (`torch._grouped_mm`;
`impl.experts=grouped` where the model has our experts).
When it is wrong: experts are so large that each product alone fills the device. Where grouped
products run already, or have no kernel (on a CPU) and run as this loop, nothing is reported.
"""

from __future__ import annotations

import re

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import attainable_rate, expert_loops, matmuls, quickest

SLOW = 0.5  # of the rate that large products reach
# Time of gathering, activation and scattering of a grouped dispatch, over that of its products: 42
# of 74 ms in a flagship mixture on an H200.
AROUND = 0.5
GROUP_THEM = (
    "torch._grouped_mm over tokens sorted by expert; in a model of transformers substitute=experts"
)

_GROUPED = re.compile(r"grouped_(mm|gemm)|GroupProblemShape|GroupedGemm|moe_gemm")


def check(case: Case) -> Finding | None:
    """Compare the rate of the whole loop with the rate of large products."""
    rows = case.rows
    found = expert_loops(rows) if rows is not None else []
    if rows is None or not found or _is_grouped(case):
        return None
    multiplied = np.logical_or.reduce([place.products for place in found])
    whole = np.logical_or.reduce([place.whole for place in found])
    spent, alone = rows.ms(whole), rows.ms(multiplied)
    durations = rows.work.duration if case.on_device else quickest(rows)
    best = attainable_rate(case, rows.of_calls(matmuls(rows)), durations=durations)
    ideal = float(np.nansum(rows.work.flops[multiplied])) / rows.steps / best if best else 0.0
    slow = float(durations[multiplied].sum()) / 1e6 * rows.scale / rows.steps
    if not ideal or ideal > SLOW * (spent if case.on_device else slow):
        return None
    gain = spent - (1 + AROUND) * ideal if case.on_device else alone * (1 - ideal / slow)
    largest = max(found, key=lambda place: rows.ms(place.products))
    mean = sum(largest.sizes) / len(largest.sizes)
    count = sum(len(place.sizes) for place in found) / rows.steps
    return Claim(
        rule="small_expert_matmuls",
        claim=f"{count:.0f} products of single experts, one by one, take "
        f"{units.milliseconds(spent)} with what is around them",
        evidence=(
            f"{largest.name}: {mean:.0f} rows on average by ({largest.k} x {largest.n})",
            f"the products alone take {units.milliseconds(alone)}, at the rate of large ones "
            f"{units.milliseconds(ideal * alone / slow)}",
        ),
        remedy="impl.experts=grouped" if case.dispatches("experts") else GROUP_THEM,
        stake_ms=spent,
        why="a product of few rows fills neither the units nor the time of its own launch",
        gain_ms=max(0.0, gain),
        work=whole,
        ordinary=case.contended and not case.on_device,
    )


def _is_grouped(case: Case) -> bool:
    """Whether grouped products run already: as kernels, or on a CPU as the loop that is seen."""
    ran = case.run.ran if case.run else None
    if not case.on_device and ran is not None and "grouped_mm" in ran.impls:
        return True
    rows = case.rows
    assert rows is not None
    return any(
        rows.labeled(column, lambda label: _GROUPED.search(label) is not None).any()
        for column in ("name", "op")
    )


RULE = check

"""Some experts get far more tokens than others, and all are padded to the busiest.

What it sees: a top-k routing, and batched products over the experts with more rows than were
assigned; or, without padding, very unequal shares of the experts, as the step reported them
(`load_LE`) or as the sizes of their products show.
Why it costs: rows of padding are multiplied like any others.
Remedy: a balancing loss or bias on the router; dropless dispatch. Where every expert has room for
all tokens, balance changes nothing.
When it is wrong: a capacity factor up to 1.5 was chosen on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import Routing, expert_capacities, expert_loops, matmuls, routing
from steplab.findings.rows import Rows

MAX_FACTOR = 1.5  # padded rows over assigned ones
DROPLESS = "dispatch without padding: sort the rows by expert, torch._grouped_mm on a GPU"
UNEQUAL = 3.0  # the busiest expert over the mean


def check(case: Case) -> Finding | None:
    """Compare padded rows with assigned ones, else the busiest expert with the mean."""
    routed = routing(case.rows) if case.rows is not None else None
    padded = _padded(case.rows, routed) if case.rows is not None and routed else None
    if padded is not None or case.expert_loads:
        return padded or _unequal_loads(case.expert_loads)
    return _unequal_products(case.rows) if case.rows is not None else None


def _padded(rows: Rows, routed: Routing) -> Finding | None:
    capacity = max(expert_capacities(rows, routed).values(), default=0)
    padded = capacity * routed.experts
    if padded < MAX_FACTOR * routed.assignments:
        return None
    # The gradient of a weight sums over the rows of an expert: there they are k.
    over = {
        number
        for number, one in matmuls(rows).items()
        if one.batch == routed.experts and capacity in (one.m, one.k)
    }
    mask = rows.of_calls(over)
    spent, wasted = rows.ms(mask), 1 - routed.assignments / padded
    for_all = capacity == routed.tokens  # however the router balances
    return Claim(
        rule="expert_imbalance",
        claim=f"{units.percent(wasted)} of the experts' rows are padding",
        evidence=(
            f"{routed.tokens:,} tokens x {routed.k} = {routed.assignments:,} rows are needed",
            f"{routed.experts} experts x {capacity:,} = {padded:,} rows are multiplied",
            *rows.hot_lines(mask),
        ),
        remedy=DROPLESS if for_all else f"balance the router (loss or bias), or {DROPLESS}",
        stake_ms=spent,
        why="every expert has room for all tokens, and empty places are multiplied too"
        if for_all
        else "all experts are padded to the busiest one, and padding is multiplied too",
        gain_ms=spent * wasted,
        work=mask,
    )


def _unequal_loads(loads_LE: Sequence[Sequence[float]]) -> Finding | None:
    """Judge the reported shares, of the layer with the busiest expert."""
    busiest = [max(load_E) * len(load_E) / sum(load_E) for load_E in loads_LE]
    times, layer = max(zip(busiest, range(len(loads_LE)), strict=True))
    idle = sum(not share for share in loads_LE[layer])
    seen = f"layer {layer}: {units.percent(max(loads_LE[layer]))} of the assignments to one"
    seen += f" of {len(loads_LE[layer])} experts"
    return _unequal(times, f"{seen}, none to {idle}" if idle else seen)


def _unequal_products(rows: Rows) -> Finding | None:
    """Judge by the sizes of the products of single experts."""
    worst = max(expert_loops(rows), key=lambda place: max(place.sizes), default=None)
    if worst is None:
        return None
    mean = sum(worst.sizes) / len(worst.sizes)
    seen = f"{worst.name}: {max(worst.sizes)} rows, {mean:.0f} on average"
    return _unequal(max(worst.sizes) / mean, seen)


def _unequal(times: float, seen: str) -> Finding | None:
    """On one device unequal experts cost no time, so this is only a note."""
    if times < UNEQUAL:
        return None
    return Finding(
        rule="expert_imbalance",
        claim=f"the busiest expert gets {times:.1f} times the mean",
        evidence=(seen,),
        remedy="balance the router (loss or bias)",
        stake_ms=0.0,
        why="experts that get no tokens learn nothing",
    )


RULE = check

"""Shards are padded: ranks gather, reduce and keep elements that are not there.

What it sees: in `fsdp::chunk_cat`, which lays out the gradients of a block for the ranks, a result
more than 5 % larger than the gradients, where shapes were recorded.
Why it costs: FSDP2 cuts every tensor along one dimension into equal parts. Where that does not
divide by the ranks, the last parts are padded, and padding is sent and stored like data.
Remedy: shard along a dimension that divides (`shard_placement_fn`), or make it divide.
When it is wrong: biases of a few elements are padded too, and do not matter.
"""

from __future__ import annotations

import math

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case

LAYS_OUT = "fsdp::chunk_cat"
PADDED = 0.05  # of what is sent
SHARDING = ("all-gather", "reduce-scatter", "all-reduce")  # gloo reduces all, then scatters
SHOWN = 3
RESULT = 3  # argument


def check(case: Case) -> Finding | None:
    """Compare what is laid out with the gradients that it is made of."""
    calls, share = _padding(case)
    if not share:
        return None
    stake = _sent_ms(case)
    worst = sorted(calls, key=lambda call: _sizes(call)[0] - _sizes(call)[1])
    return Finding(
        rule="padded_shards",
        claim=f"{units.percent(share)} of the elements that ranks exchange and keep is padding",
        evidence=tuple(_words(call) for call in worst[:SHOWN] if _sizes(call)[1] > _sizes(call)[0]),
        remedy="shard along a dimension that divides by the ranks (shard_placement_fn of "
        "fully_shard), or make the first one divide",
        stake_ms=stake,
        why="what does not divide is filled up, and sent and stored like data",
        gain_ms=stake * share,
    )


def padded_ms(case: Case) -> float:
    """Return the exposed transfer per step that carries padding."""
    return _sent_ms(case) * _padding(case)[1]


def _padding(case: Case) -> tuple[list[OpCall], float]:
    """Return the calls that lay gradients out, and the padded share; 0 where it is small."""
    every = case.rows.calls if case.rows is not None else ()
    calls = [call for call in every if call.name == LAYS_OUT and _sizes(call)[1]]
    given, laid = (sum(_sizes(call)[i] for call in calls) for i in (0, 1))
    return calls, 1 - given / laid if laid * (1 - PADDED) > given else 0.0


def _sent_ms(case: Case) -> float:
    """Return what nothing hides of the collectives that shard and gather."""
    kinds = case.ranks.kinds if case.ranks else ()
    return sum(k.exposed_ms for k in kinds if k.kind in SHARDING) or case.term_ms("communication")


def _sizes(call: OpCall) -> tuple[int, int]:
    """Return elements of the gradients and of what is laid out; 0, 0: not recorded."""
    given = call.lists[0] if call.lists else ()
    result = call.tensor(RESULT)
    if not given or result is None:
        return 0, 0
    return sum(math.prod(dims) for dims in given), result.numel


def _words(call: OpCall) -> str:
    given, laid = _sizes(call)
    shapes = ", ".join("x".join(map(str, dims)) for dims in call.lists[0][:SHOWN])
    return f"{shapes}: {given:,} elements become {laid:,}"


RULE = check

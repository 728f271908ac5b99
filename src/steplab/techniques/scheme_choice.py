"""Which other way of sharing a step could pay, by what its ranks sent and waited for. No torch.

No scheme computes faster. One can hide communication behind the backward or send less of it, so the
exposed communication is the most that it can save of the time; or share out what all ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from steplab.core import Run, Setting, Settings, units
from steplab.core.run import Communication
from steplab.techniques.context import StepContext, Suggestion

EXPOSED = "ranks:exposed communication"
WEIGHTS, GRADIENTS, STATE = "memory:weights", "memory:gradients", "memory:optimizer state"
HIDES = ("bucket", "ddp", "overlap")  # sends gradients while the backward runs; the likeliest first
PRIORS = {"overlap": 0.5}  # as many collectives as parameters
WHEN = {"fsdp": "block by block", **dict.fromkeys(HIDES, "while the backward runs")}
SHARDS = ("zero1", "fsdp")
# Buckets that a backward is cut into. What is exposed is the last one; more of them gain little.
BUCKETS = 8
DEFAULT_BUCKET_MB = 25
# Bytes of a collective. Below it is mostly latency, which half of the bytes does not shorten: two
# gloo ranks on two cores add up 64 KiB in 0.5 ms, 256 KiB in 0.8, 1 MiB in 1.6 and 16 MiB in 20.
LARGE_MESSAGE = 256 * 2**10
MANY_GATHERS = 8
TOGETHER = 4  # blocks; benchmarks/sharding_cost.py: 40 % less host time than one by one
HALF_DTYPES = ("bf16", "bf16-weights", "fp16")
KEPT = ("reduce", "exact", "expert")  # settings that mean the same to every scheme


def suggest_schemes(context: StepContext, current: Settings) -> list[Suggestion]:
    """Return the schemes, and settings of the present one, that could pay on this step."""
    run, sent = context.run, context.run.communication
    if run.spec.ranks == 1 or not current or sent is None:
        return []
    found = list(_sharding(run, sent, current))
    if run.spec.mode in ("forward+backward", "full"):  # others have no gradients to send
        found += [*_hiding(run, sent, current), *_smaller_buckets(sent, current)]
        found += [*_fewer_gathers(run, sent, current), *_fewer_bytes(context, sent, current)]
    return found


def _hiding(run: Run, sent: Communication, current: Settings) -> Iterator[Suggestion]:
    """Send gradients while the backward goes on, in another way than now."""
    if current["data"] in SHARDS and not _fits_whole(run, sent):
        return
    reason = (
        f"{units.counted(sent.calls, 'collective')} of {units.bytes_(sent.bytes)} in all "
        f"{WHEN.get(str(current['data']), 'after the backward')}"
    )
    for data in HIDES:
        if data != current["data"]:
            prior = PRIORS.get(data, 1.0)
            yield Suggestion(_scheme(data, current), {EXPOSED: 1.0}, prior, reason=reason)


def _smaller_buckets(sent: Communication, current: Settings) -> Iterator[Suggestion]:
    """Cut gradients into more buckets: only the last one has no backward left to hide behind."""
    if current["data"] not in ("bucket", "ddp"):
        return
    size = max(1, math.ceil(sent.bytes / BUCKETS / 2**20))
    present = int(current.get("bucket_mb", DEFAULT_BUCKET_MB))
    now, then = (math.ceil(sent.bytes / 2**20 / mb) for mb in (present, size))
    if then > now:
        reason = f"{units.bytes_(sent.bytes)} in {units.counted(now, 'bucket')}, {then} by this"
        yield Suggestion({**current, "bucket_mb": size}, {EXPOSED: 1 - now / then}, reason=reason)


def _fewer_gathers(run: Run, sent: Communication, current: Settings) -> Iterator[Suggestion]:
    """Keep what was gathered, or gather more at a time."""
    if current["data"] != "fsdp":
        return
    gathers = [one for one in sent.collectives if one.op == "all-gather"]
    calls, gathered = sum(one.calls for one in gathers), sum(one.bytes for one in gathers)
    reason = f"{units.counted(calls, 'all-gather')} of {units.bytes_(gathered)} in all"
    if calls < MANY_GATHERS:
        return
    if current.get("reshard", True):
        # Once a step instead of twice for every micro-batch.
        gone = gathered / sent.bytes * (1 - 0.5 / run.spec.accumulate)
        yield Suggestion({**current, "reshard": False}, {EXPOSED: gone}, reason=reason)
    if current.get("together", 1) == 1:
        gone = 1 - 1 / TOGETHER
        yield Suggestion({**current, "together": TOGETHER}, {EXPOSED: gone}, reason=reason)


def _fewer_bytes(
    context: StepContext, sent: Communication, current: Settings
) -> Iterator[Suggestion]:
    """Send gradients in bf16, where products are rounded as coarsely, and bytes take the time."""
    dtype = context.recipe.techniques.get("precision", {}).get("dtype")
    if dtype not in HALF_DTYPES or current.get("exact") or current.get("reduce") == "bf16":
        return
    sums = [one for one in sent.collectives if "reduce" in one.op]
    calls, summed = sum(one.calls for one in sums), sum(one.bytes for one in sums)
    if calls and summed / calls >= LARGE_MESSAGE:
        reason = f"{units.bytes_(summed)} of gradients in fp32"
        gone = 0.5 * summed / sent.bytes
        yield Suggestion({**current, "reduce": "bf16"}, {EXPOSED: gone}, reason=reason)


def _sharding(run: Run, sent: Communication, current: Settings) -> Iterator[Suggestion]:
    """Share out what every rank holds whole: all but one part in N goes."""
    ranks, gone = run.spec.ranks, 1 - 1 / run.spec.ranks
    state, weights = (units.bytes_(sent.held_bytes[k]) for k in ("optimizer state", "weights"))
    if current["data"] not in SHARDS and current.get("expert", 1) == 1:
        reason = f"each of {ranks} ranks has {state} of optimizer state"
        yield Suggestion(_scheme("zero1", current), {GRADIENTS: gone, STATE: gone}, reason=reason)
    if current["data"] != "fsdp":
        savings = {WEIGHTS: gone, GRADIENTS: gone}
        if current["data"] != "zero1":
            savings[STATE] = gone
        reason = f"each of {ranks} ranks has {weights} of weights and {state} of optimizer state"
        yield Suggestion(_scheme("fsdp", current), savings, reason=reason)


def _scheme(data: str, current: Settings) -> dict[str, Setting]:
    return {"data": data, **{key: current[key] for key in KEPT if key in current}}


def _fits_whole(run: Run, sent: Communication) -> bool:
    """Whether a rank has room for what it holds a part of now."""
    memory = run.memory
    if memory is None or memory.total is None:
        return True
    return memory.peak + sum(sent.held_bytes.values()) * (run.spec.ranks - 1) <= memory.total

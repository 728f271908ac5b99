"""One step on one card: counted, timed, laid out, and remembered as a Prediction."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from steplab.core import Run, RunSpec
from steplab.core.errors import UserError
from steplab.core.prediction import COUNTED, MEASURED, MODELLED, Prediction
from steplab.estimate.cluster import Cluster
from steplab.estimate.counted import Counted, count
from steplab.estimate.kernels import KernelTimes
from steplab.estimate.timeline import AS_EXPECTED, Pace, lay_out
from steplab.hardware.catalog import Card
from steplab.store.predictions import device_of
from steplab.techniques.recipes import alone

CONTEXT_BYTES = 600 * 2**20  # that the driver and CUDA's own code take of a card
LARGEST_BATCH = 2**20
NEVER_IDLE = 0.95  # share of the step in which kernels ran


class TooLarge(UserError):
    """Not even one sequence fits."""


class StepCounts:
    """Counts of one step on one card with any batch; each is made once."""

    def __init__(self, spec: RunSpec, card: Card, times: KernelTimes) -> None:
        self.spec, self.card, self.times = spec, card, times
        self._counted: dict[int, Counted] = {}

    def of(self, batch: int) -> Counted:
        """Return the count with so many sequences per micro-batch."""
        if batch not in self._counted:
            spec = replace(self.spec, batch=batch)
            self._counted[batch] = count(spec, self.card, self.times.scratch)
        return self._counted[batch]

    def reserved(self, batch: int) -> int:
        """Return the bytes that the allocator and the libraries take from the driver."""
        return self.of(batch).reserved_bytes + self.times.workspace_bytes


def predict(
    counts: StepCounts,
    cluster: Cluster,
    batch: int = 0,
    measured: Run | None = None,
    single: Run | None = None,
) -> Prediction:
    """Return what one step will take and hold on each rank; `batch` 0 is that of its spec.

    `measured` is a Run of its rank 0 in a group that does nothing; `single` one of the step that
    nobody shares, by which the pace of card and host is known.
    """
    card, times = counts.card, counts.times
    counted = counts.of(batch or counts.spec.batch)
    spec = counted.spec
    shared = cluster if spec.ranks > 1 else None
    clock = measured.clock if measured else None
    pace = pace_of(single, counts) if single else AS_EXPECTED
    timeline = lay_out(counted, times, card, shared, clock.step if clock else None, pace)
    low, high = timeline.interval_us
    peak = card.peak(_dtype(spec))
    flops = counted.model_flops
    prediction = Prediction(
        spec=spec,
        card=card.name,
        step_ms=timeline.step_us / 1e3,
        low_ms=low / 1e3,
        high_ms=high / 1e3,
        device_ms=timeline.device_us / 1e3,
        host_ms=timeline.host_us / 1e3,
        communication_ms=timeline.communication_us / 1e3,
        exposed_ms=timeline.exposed_us / 1e3,
        tokens=counted.tokens * spec.ranks,
        flops=flops,
        mfu=flops / timeline.step_us / peak / 1e6 if flops and peak else None,
        peak_bytes=counted.peak_bytes + times.workspace_bytes,
        reserved_bytes=counted.reserved_bytes + times.workspace_bytes,
        card_bytes=card.board.memory_bytes - CONTEXT_BYTES,
        kinds={**counted.kinds, "other": counted.kinds["other"] + times.workspace_bytes},
        collectives=counted.collectives,
        sent=cluster.sent(counted.messages),
        parameters=counted.parameters,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        known_by={
            "memory": COUNTED,
            "bytes sent": COUNTED,
            "FLOPs": COUNTED,
            "kernels": f"{MODELLED} from calls measured on {times.card.name}, {times.conditions}",
            "communication": f"{MODELLED}: {cluster.known_by}",
        },
    )
    if single:
        told = f", at the pace of {single.id}: kernels {pace.kernels:.2f}, host {pace.host:.2f} "
        known = {**prediction.known_by, "kernels": prediction.known_by["kernels"] + told + "times"}
        prediction = replace(prediction, known_by=known)
    return _as_measured(prediction, measured) if measured else prediction


def unshared(spec: RunSpec) -> RunSpec:
    """Return the step as one process makes it, with what one rank has of the batch."""
    return replace(spec, ranks=1, backend="", recipe=alone(spec.recipe))


def pace_of(single: Run, counts: StepCounts) -> Pace:
    """Return the pace of a Run of the unshared step, against what was expected of it.

    A device that is never idle holds its host back, whose own pace is not seen then.
    """
    assert single.clock is not None and single.ran is not None
    own = StepCounts(unshared(counts.spec), counts.card, counts.times)
    expected = lay_out(own.of(single.spec.batch), counts.times, counts.card, None)
    step, busy = single.clock.step.median, single.ran.device_busy_ms
    kernels = busy * 1e3 / expected.device_us if busy else 1.0
    is_seen = busy is not None and busy < NEVER_IDLE * step and expected.host_us
    host = single.clock.host.median * 1e3 / expected.host_us if is_seen else 1.0
    return Pace(kernels, host)


def _as_measured(prediction: Prediction, run: Run) -> Prediction:
    """Return the prediction with what rank 0 was seen to hold, and how that is known."""
    assert run.clock is not None and run.memory is not None
    where = f"{MEASURED}: rank 0 of {run.spec.ranks} in a group that does nothing, on "
    mfu = run.figures.mfu if run.figures else None
    return replace(
        prediction,
        card=device_of(run),
        mfu=mfu * run.clock.step.median / prediction.step_ms if mfu is not None else None,
        peak_bytes=run.memory.peak,
        reserved_bytes=run.memory.reserved or run.memory.peak,
        card_bytes=run.memory.total or run.environment.memory_bytes or 0,
        kinds={},
        known_by={
            **prediction.known_by,
            "memory": MEASURED,
            "kernels": where + run.environment.conditions_on(run.spec.device),
        },
    )


def largest_batch(counts: StepCounts) -> int:
    """Return the most sequences per micro-batch that fit; TooLarge where not even one does.

    Memory grows by about the same bytes with every sequence, so two counts tell where it ends, and
    those that follow come nearer: what is small is rounded up to blocks and pools.
    """
    spec, reserved = counts.spec, counts.reserved
    room = counts.card.board.memory_bytes - CONTEXT_BYTES
    one = reserved(1)
    if one > room:
        raise TooLarge(
            f"{spec.title.replace(f'batch {spec.batch}', 'batch 1')} needs "
            f"{one / 2**30:.1f} GiB, and a rank on the {counts.card.name} has {room / 2**30:.1f}.",
            "Add checkpointing=blocks, parallel=fsdp with more --ranks, or take a smaller --size.",
        )
    low, high = 1, LARGEST_BATCH + 1  # fits, and does not
    at = max(2, spec.batch)
    while True:
        each = max(1.0, (reserved(at) - one) / (at - 1))
        at = min(max(low, int(1 + (room - one) / each)), high - 1)
        if at == low:
            return low
        low, high = (at, high) if reserved(at) <= room else (low, at)


def _dtype(spec: RunSpec) -> str:
    dtype = str(spec.recipe.techniques.get("precision", {}).get("dtype", "fp32"))
    return "bf16" if dtype == "bf16-weights" else dtype

"""One spec on one card: counted, timed, laid out, and remembered as a Prediction."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.core.prediction import COUNTED, MODELLED, Prediction
from steplab.estimate.counted import count
from steplab.estimate.kernels import KernelTimes
from steplab.estimate.timeline import Cluster, lay_out
from steplab.hardware.catalog import Card

CONTEXT_BYTES = 600 * 2**20  # that the driver and CUDA's own code take of a card
LARGEST_BATCH = 2**20


def predict(spec: RunSpec, card: Card, times: KernelTimes, cluster: Cluster) -> Prediction:
    """Return what one step of `spec` will take and hold on each rank."""
    counted = count(spec, card, times.scratch)
    shared = cluster if spec.ranks > 1 else None
    timeline = lay_out(counted, times, card, shared)
    low, high = timeline.interval_us
    peak = card.peak(_dtype(spec))
    flops = counted.model_flops
    return Prediction(
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
        parameters=counted.parameters,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        known_by={
            "memory": COUNTED,
            "bytes sent": COUNTED,
            "FLOPs": COUNTED,
            "kernels": f"{MODELLED} from calls measured on {times.card.name}, {times.conditions}",
            "communication": MODELLED,
        },
    )


def largest_batch(
    spec: RunSpec, card: Card, times: KernelTimes, known: Prediction | None = None
) -> int:
    """Return the most sequences per micro-batch that fit; a UserError where not even one does.

    Memory grows by about the same bytes with every sequence, so two counts tell where it ends; the
    next is the proof. `known` is what was predicted of the same step with any batch.
    """
    room = card.board.memory_bytes - CONTEXT_BYTES
    seen = {known.spec.batch: known.reserved_bytes} if known is not None else {}

    def reserved(batch: int) -> int:
        if batch not in seen:
            counted = count(replace(spec, batch=batch), card, times.scratch)
            seen[batch] = counted.reserved_bytes + times.workspace_bytes
        return seen[batch]

    one = reserved(1)
    if one > room:
        raise UserError(
            f"{spec.title.replace(f'batch {spec.batch}', 'batch 1')} needs "
            f"{one / 2**30:.1f} GiB, and a rank on the {card.name} has {room / 2**30:.1f}.",
            "Add checkpointing=blocks, parallel=fsdp with more --ranks, or take a smaller --size.",
        )
    other = max(2, spec.batch)
    each = max(1.0, (reserved(other) - one) / (other - 1))
    batch = min(LARGEST_BATCH, int(1 + (room - one) / each))
    while batch > 1 and reserved(batch) > room:
        nearer = 1 + (batch - 1) * (room - one) / (reserved(batch) - one)
        batch = max(1, min(batch - 1, int(nearer)))
    return batch


def _dtype(spec: RunSpec) -> str:
    dtype = str(spec.recipe.techniques.get("precision", {}).get("dtype", "fp32"))
    return "bf16" if dtype == "bf16-weights" else dtype

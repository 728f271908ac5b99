"""Prediction: what a step was expected to cost before it ran. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from steplab.core.codec import encode
from steplab.core.run import Collective, Run
from steplab.core.spec import RunSpec

COUNTED, MEASURED, MODELLED = "counted", "measured", "modelled"


@dataclass(frozen=True)
class Sent:
    """What one rank sends in a step by collectives of one kind, over one link."""

    op: str
    ranks: int  # of the group
    link: str  # the slowest that it crosses
    calls: int
    bytes: int
    ms: float  # of all calls, if nothing hides them


@dataclass(frozen=True)
class Prediction:
    """An estimate of one step of one rank; times in milliseconds, with an 80 % interval."""

    spec: RunSpec
    card: str
    step_ms: float
    low_ms: float
    high_ms: float
    device_ms: float  # kernels
    host_ms: float
    communication_ms: float
    exposed_ms: float  # communication that nothing hides
    tokens: int  # of all ranks, per step
    flops: float | None  # model FLOPs of one rank
    mfu: float | None
    peak_bytes: int  # allocated, of one rank
    reserved_bytes: int
    card_bytes: int
    kinds: Mapping[str, int] = field(default_factory=dict)  # of the peak
    collectives: tuple[Collective, ...] = ()
    sent: tuple[Sent, ...] = ()
    parameters: int = 0
    created: str = ""
    # How each number is known: counted on tensors without data, measured, or modelled.
    known_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether a rank has room for it."""
        return self.reserved_bytes <= self.card_bytes

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens / self.step_ms * 1e3

    @property
    def sent_bytes(self) -> int:
        """Bytes of all messages of one rank in one step."""
        return sum(one.bytes for one in self.collectives)

    def error(self, run: Run) -> tuple[float, float | None] | None:
        """Return the relative errors of time and memory against a Run; None where it has none."""
        if run.clock is None or not run.clock.step.values:
            return None
        memory = None
        alike = self.known_by.get("memory") == MEASURED  # else it is that of CUDA's allocator
        if run.memory is not None and (alike or run.memory.source == "cuda allocator"):
            memory = self.peak_bytes / run.memory.peak - 1
        return self.step_ms / run.clock.step.median - 1, memory

    def holds(self, run: Run) -> bool:
        """Whether the measured time lies in the interval."""
        assert run.clock is not None
        return self.low_ms <= run.clock.step.median <= self.high_ms


def work_key(spec: RunSpec) -> str:
    """Return 16 hex digits that are equal for specs of one step, however it is measured."""
    same = replace(
        spec, warmup=5, steps=10, peak_tflops=None, device="cuda", backend="", seed=42, size=""
    )
    text = json.dumps(encode(same), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]

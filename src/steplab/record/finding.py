"""Finding: a fault, its evidence, what is at stake and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One statement about a Run. `rule` is named for the fault, never for the cure."""

    rule: str
    claim: str
    evidence: tuple[str, ...]
    remedy: str
    stake_ms: float | None = None  # milliseconds of the step that the fault takes
    stake_bytes: int | None = None
    why: str = ""  # why it costs, in one sentence
    gain_ms: float | None = None  # milliseconds that the remedy is expected to give back

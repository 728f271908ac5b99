"""Comparison: two measurements side by side, and the verdict that they allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from steplab.core.samples import Samples
from steplab.core.table import Table

Verdict = Literal["faster", "slower", "cannot tell", "not alike"]


WIDE = 3.0  # times as fast, and as slow: an interval with both ends says nothing


@dataclass(frozen=True)
class Change:
    """Median time of B over A's, minus one: -0.1 is ten percent less time. With its interval."""

    value: float
    low: float
    high: float
    confidence: float  # of the interval
    detectable: float | None  # least change that would be seen four times in five; None: unknown

    @property
    def says_nothing(self) -> bool:
        """Whether the samples have so little in common that `value` is no estimate."""
        return WIDE * (1 + self.low) < 1 and 1 + self.high > WIDE


@dataclass(frozen=True)
class Comparison:
    """B compared with A. `verdict` says what B is; "not alike": they did different work."""

    a: str  # id of the Run, or name of the trace
    b: str
    verdict: Verdict
    reason: str  # one sentence
    samples_a: Samples  # milliseconds per step
    samples_b: Samples
    method: str  # how the samples came about, one sentence
    change: Change | None = None  # None where the work differs
    # "sides", "differences", "phases", "budget", "kernels", "modules"; only those that have rows.
    tables: Mapping[str, Table] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()  # of A and B, once where they are the same

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        if self.verdict in ("faster", "slower"):
            return f"B is {self.verdict} than A"
        return "A and B are not alike" if self.verdict == "not alike" else "Cannot tell"

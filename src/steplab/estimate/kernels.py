"""Kernel times from those of other calls of the same operator, measured on a card of the catalog.

`hardware/kernels_h200.json` has them; benchmarks/kernel_efficiency.py writes it. A call's rate
(FLOP/s of what computes, bytes/s of what moves) is the mean over its nearest measured neighbors by
size, on a logarithmic scale; how much these differ is what the estimate does not know. On another
card, what computes is scaled by the dense peak and what moves by the bandwidth.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from steplab.core.errors import UserError
from steplab.estimate.calls import Call
from steplab.estimate.ledger import Kernel
from steplab.hardware.catalog import CARDS, Card

SHIPPED = Path(__file__).parents[1] / "hardware" / "kernels_h200.json"
MEASURED_ON = "H200 SXM"
NEIGHBORS = 4
NEARBY = (
    0.25  # added to squared distances, in octaves: points nearer than half an octave count alike
)
# Of the rate, for an operator that was never measured: the elementwise ones differ by so much.
UNKNOWN_SPREAD = 0.5
SPREAD_PER_OCTAVE = 0.06  # beyond the nearest point
ANY_COPY = "add fp32"  # stands for a call that moves and was not measured
ANY_PRODUCT = "product bf16"


class Time(NamedTuple):
    """Microseconds, and the standard deviation of their logarithm."""

    us: float
    spread: float


@dataclass(frozen=True)
class Point:
    """One measured call."""

    size: tuple[float, ...]
    work: float
    us: float
    scratch: int
    bytes: float


@dataclass(frozen=True, eq=False)
class KernelTimes:
    """What was measured, by kind, and what the host and the libraries need."""

    points: Mapping[str, Sequence[Point]]
    # Of the host: "forward" per call of an operator there, "forward own" for one of ours beside it,
    # "forward base" once, "compiled" per kernel that was compiled and "graph" per graph of them,
    # "checkpointed" more per call of a forward that will be repeated, "collective" for each.
    host_us: Mapping[str, float]
    workspace_bytes: int  # that libraries keep
    card: Card  # on which all this was measured
    conditions: str = ""

    def time(self, call: Call, card: Card) -> Time:
        """Return how long a call takes on a card."""
        us, spread = self._time_here(call)
        if card is self.card or card.name == self.card.name:
            return Time(us, spread)
        # A call that computes scales with the peak of its dtype, any other with the bandwidth.
        scale = self.card.bandwidth_gbs / card.bandwidth_gbs
        if call.flops:
            here, there = self.card.peak(call.dtype), card.peak(call.dtype)
            scale = here / there if here and there else scale
        return Time(us * scale, math.hypot(spread, OTHER_CARD_SPREAD))

    def scratch(self, call: Call) -> int:
        """Return the bytes that a call needs beside its results."""
        points = [point for point in self.points.get(call.kind, ()) if point.bytes]
        if not points:
            return 0
        nearest = min(points, key=lambda point: _distance(point.size, call.size))
        return int(nearest.scratch * (call.bytes / nearest.bytes) ** self._growth(call.kind))

    def host(self, kernel: Kernel) -> float:
        """Return the host's microseconds until it has launched a kernel."""
        if kernel.is_compiled:
            return self.host_us["compiled"] + kernel.graphs * self.host_us["graph"]
        phase = kernel.phase if kernel.phase in self.host_us else "forward"
        own = self.host_us.get(f"{phase} own", 0.0) if kernel.is_own else 0.0
        return kernel.calls * self.host_us[phase] + own

    @functools.cache  # noqa: B019 - one object per process
    def _growth(self, kind: str) -> float:
        """Return 1 where scratch grows with the bytes of a call, 0 where it is always the same."""
        used = [(p.scratch, p.bytes) for p in self.points[kind] if p.scratch and p.bytes]
        if len(used) < 2:
            return 1.0
        same = statistics.pstdev(math.log(scratch) for scratch, _ in used)
        shares = statistics.pstdev(math.log(scratch / moved) for scratch, moved in used)
        return 0.0 if same < shares else 1.0

    @functools.cache  # noqa: B019 - one object per process
    def _time_here(self, call: Call) -> Time:
        points, extra = self.points.get(call.kind), 0.0
        if not points:
            points, call, extra = self._instead(call)
        ranked = sorted(points, key=lambda point: _distance(point.size, call.size))
        near = [(_distance(point.size, call.size), point) for point in ranked[:NEIGHBORS]]
        weights = [1 / (NEARBY + distance) ** 2 for distance, _ in near]
        total = sum(weights)
        logs = [math.log(max(point.work, 1.0) / point.us) for _, point in near]
        mean = sum(w * log for w, log in zip(weights, logs, strict=True)) / total
        square = sum(w * (log - mean) ** 2 for w, log in zip(weights, logs, strict=True)) / total
        shortest = min(point.us for point in points)
        us = max(call.work / math.exp(mean), shortest)
        away = SPREAD_PER_OCTAVE * math.sqrt(near[0][0])
        return Time(us, math.sqrt(square + away**2 + extra**2 + TIMER_SPREAD**2))

    def _instead(self, call: Call) -> tuple[Sequence[Point], Call, float]:
        """Return other points for a call whose operator was not measured."""
        name = call.kind.split(" ")[0]
        alike = [points for kind, points in self.points.items() if kind.split(" ")[0] == name]
        if alike and len(alike[0][0].size) == len(call.size):
            return max(alike, key=len), call, UNKNOWN_SPREAD / 2
        if call.flops:
            side = math.log2(max(call.flops / 2, 1.0)) / 3
            cube = Call("", (0.0, side, side, side), call.flops, call.bytes)
            return self.points[ANY_PRODUCT], cube, UNKNOWN_SPREAD
        copy = Call("", (math.log2(max(call.bytes, 1.0)),), 0.0, call.bytes)
        return self.points[ANY_COPY], copy, UNKNOWN_SPREAD


OTHER_CARD_SPREAD = 0.15  # peaks and bandwidths of datasheets say no more
TIMER_SPREAD = 0.03  # the same kernel in a queue of its own and in a step


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the squared distance in octaves."""
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


@functools.cache
def shipped_times() -> KernelTimes:
    """Return what came with steplab."""
    data = json.loads(SHIPPED.read_text(encoding="utf-8"))
    points: dict[str, list[Point]] = {}
    for kind, size, flops, moved, us, scratch in data["calls"]:
        points.setdefault(kind, []).append(Point(tuple(size), flops or moved, us, scratch, moved))
    return KernelTimes(
        points,
        data["host_us"],
        data["workspace_bytes"],
        find_named(MEASURED_ON),
        data["conditions"],
    )


def find_named(name: str) -> Card:
    """Return the card that a user names: h200, "H100 SXM5", a100-80gb."""
    words = _plain(name)
    exact = [card for card in CARDS if _plain(card.name) == words]
    found = exact or [card for card in CARDS if _plain(card.name).startswith(words)]
    if not words or not found:
        known = ", ".join(card.name for card in CARDS)
        raise UserError(f"There is no card {name!r} in the catalog.", f"Known: {known}.")
    return found[0]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())

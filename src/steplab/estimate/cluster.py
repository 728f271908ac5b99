"""How ranks are connected, and how long their collectives take: by the catalog, or measured here.

A collective costs its latency and its bytes over a bandwidth, as NCCL models itself: a ring takes a
step for every rank, of which those between machines are slow, and an all-reduce may go along a tree
instead. In a ring over machines every GPU sends a part through a network card of its own, so the
ring is as fast as all cards of a machine together, if its links within are. `bench collectives`
replaces the catalog's links by fits to what was timed on the same cards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from steplab.core import Run
from steplab.core.prediction import Sent
from steplab.costs.collectives import bus_factor
from steplab.estimate.kernels import Time
from steplab.estimate.ledger import Sent as Message
from steplab.hardware.links import Link
from steplab.store.predictions import device_of

START_US = 14.0  # of any collective, by NCCL's src/graph/tuning.cc (LL128)
ALONE_US = 0.3  # a group of one sends nothing
WORKLOAD = "collectives"  # of the Runs that `bench collectives` stores
LEAST_SPREAD = 0.05  # of what was timed: the same collective in a step and by itself
LEAST_POINTS = 2  # a latency and a bandwidth


@dataclass(frozen=True)
class Cluster:
    """How ranks are connected: `per_machine` of them by `inner`, machines by `outer`."""

    inner: Link
    outer: Link
    per_machine: int = 8
    measured: Mapping[str, Link] = field(default_factory=dict)  # by collective, within a machine

    def time(self, op: str, ranks: int, size: int, stride: int = 1) -> Time:
        """Return how long a collective of `size` bytes takes.

        Its group has `ranks` ranks, each `stride` after the one before.
        """
        if ranks == 1:
            return Time(ALONE_US, 0.0)
        inner = self.measured.get(op, self.inner)
        together = min(ranks, max(1, self.per_machine // stride))  # of the group on one machine
        machines = math.ceil(ranks / together)
        speed, spread = inner.bytes_per_us, inner.spread
        if machines > 1:
            # Of an all-to-all nearly all leaves the machine, each rank's part by its own card.
            cards = 1 if op == "all-to-all" else together
            speed, spread = min(speed, cards * self.outer.bytes_per_us), self.outer.spread
        latency = _latency(op, together, machines, inner.latency_us, self.outer.latency_us)
        return Time(START_US + latency + bus_factor(op, ranks) * size / speed, spread)

    def link(self, op: str, ranks: int, stride: int = 1) -> Link:
        """Return the slowest link that a collective crosses."""
        inside = ranks <= max(1, self.per_machine // stride)
        return self.measured.get(op, self.inner) if inside else self.outer

    def sent(self, messages: Iterable[Message]) -> tuple[Sent, ...]:
        """Return what is sent over which link, by kind of collective."""
        found: dict[tuple[str, int, str], list[tuple[int, float]]] = {}
        for one in messages:
            key = (one.op, one.ranks, self.link(one.op, one.ranks, one.stride).name)
            us = self.time(one.op, one.ranks, one.bytes, one.stride).us
            found.setdefault(key, []).append((one.bytes, us))
        return tuple(
            Sent(*key, len(calls), sum(size for size, _ in calls), sum(us for _, us in calls) / 1e3)
            for key, calls in sorted(found.items())
        )

    @property
    def known_by(self) -> str:
        """How the times of collectives are known, in words."""
        inside = f"{self.inner.name} ({self.inner.known_by})"
        if self.measured:
            seen = next(iter(self.measured.values())).known_by
            inside = f"{', '.join(sorted(self.measured))} {seen}, others {inside}"
        return f"{inside}; between machines {self.outer.name} ({self.outer.known_by})"


def _latency(op: str, together: int, machines: int, inner_us: float, outer_us: float) -> float:
    """Return the latency of all steps; `together` ranks on each of so many `machines`."""
    if op == "all-to-all":  # all messages are under way at once
        return outer_us if machines > 1 else inner_us
    inside = (together - 1) * machines
    ring = inside * inner_us + (machines - 1) * outer_us
    if op != "all-reduce":
        return ring
    tree = (together - 1) * inner_us + math.ceil(math.log2(machines)) * outer_us
    return 2 * min(ring, tree)


@dataclass(frozen=True)
class Point:
    """One collective that was timed."""

    ranks: int
    bytes: int
    us: float


def measured_links(runs: Iterable[Run], device: str) -> dict[str, Link]:
    """Return the links that `bench collectives` has seen between devices of that name, by op.

    {} where nothing was timed on several ranks of it.
    """
    points: dict[str, list[Point]] = {}
    for run in runs:
        if run.spec.workload != WORKLOAD or run.status != "ok" or run.clock is None:
            continue
        world = int(run.spec.config["world"])
        if device_of(run) == device and world > 1:
            message = int(run.tables["bandwidth"].rows[0][0] or 0)
            point = Point(world, message, run.clock.step.median * 1e3)
            points.setdefault(str(run.spec.config["op"]), []).append(point)
    many = {op: found for op, found in points.items() if len(found) >= LEAST_POINTS}
    return {op: fit_link(op, found, device) for op, found in many.items()}


def fit_link(op: str, points: list[Point], device: str) -> Link:
    """Return the latency and the bandwidth that explain the times best, and how well they do."""
    steps = np.array([_latency(op, point.ranks, 1, 1.0, 0.0) for point in points])
    moved = np.array([bus_factor(op, point.ranks) * point.bytes for point in points])
    us = np.array([point.us for point in points])
    # Relative errors count, or the largest message would decide alone.
    terms = np.stack([steps, moved], axis=1) / us[:, None]
    rest = np.maximum(us - START_US, 0.05 * us) / us
    latency, per_byte = np.linalg.lstsq(terms, rest, rcond=None)[0]
    if latency < 0:  # the bandwidth explains all of it
        latency, per_byte = 0.0, float((terms[:, 1] * rest).sum() / (terms[:, 1] ** 2).sum())
    per_byte = max(float(per_byte), 1e-12)
    model = START_US + latency * steps + per_byte * moved
    spread = float(np.sqrt(np.mean(np.log(us / model) ** 2)))
    worlds = sorted({point.ranks for point in points})
    ranks = f"{worlds[0]} ranks" if len(worlds) == 1 else f"{worlds[0]} to {worlds[-1]} ranks"
    return Link(
        f"{op} of {device}",
        1e-3 / per_byte,
        1.0,
        float(latency),
        "measured",
        f"bench collectives on {ranks} of {device}",
        max(LEAST_SPREAD, spread),
    )

"""The step laid out in time: what the host asks for, what every stream does, what waits for what.

The host issues one call after another; a kernel begins when it was asked for, its stream has come
so far, and all that the stream waits for is done. Collectives run on streams of their own, one for
each group (NCCL has one for each, whatever the collective), beside the kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from steplab.core import Samples
from steplab.estimate.cluster import Cluster
from steplab.estimate.counted import Counted
from steplab.estimate.kernels import KernelTimes
from steplab.estimate.ledger import Kernel, Mark, Sent
from steplab.hardware.catalog import Card

Z80 = 1.2816  # four fifths of a normal distribution lie within so many deviations
GAP_US = 0.3  # between two kernels of a stream: one ends, the next begins
HOST_SPREAD = 0.25  # of the host's time: it differs between machines and hours
STEP_SPREAD = 0.03  # of any step, from day to day
# Errors of kernels are no coin tosses: calls of one kind err together. A step behaves as if it had
# a third of the deviation of its kernels in common.
SHARED = 0.35


@dataclass(frozen=True)
class Pace:
    """How many times as long as expected kernels take on a machine, and its host."""

    kernels: float = 1.0
    host: float = 1.0


AS_EXPECTED = Pace()


@dataclass(frozen=True)
class Timeline:
    """How long a step takes, of what it consists, and how sure that is."""

    step_us: float
    spread: float  # standard deviation of the logarithm of the step's time
    device_us: float  # kernels of the longest stream
    host_us: float
    communication_us: float
    exposed_us: float  # communication that nothing hides
    host_spread: float = HOST_SPREAD  # 0 where the host was measured

    @property
    def interval_us(self) -> tuple[float, float]:
        """The 80 % interval of the step's time; a host that is slower than expected may decide."""
        factor = math.exp(Z80 * self.spread)
        slow_host = self.host_us * math.exp(Z80 * self.host_spread)
        return self.step_us / factor, max(self.step_us * factor, slow_host)


def lay_out(
    counted: Counted,
    times: KernelTimes,
    card: Card,
    cluster: Cluster | None,
    measured: Samples | None = None,
    pace: Pace = AS_EXPECTED,
) -> Timeline:
    """Lay out one step; without a cluster communication takes no time.

    `measured` are times of this rank's step, in ms, in a group that does nothing: kernels and host
    are taken to be slower than expected by one factor, and only communication is modelled.
    """
    free = _simulate(counted, times, card, None, pace)
    if measured and free.end:
        scale = measured.median * 1e3 / free.end
        pace = Pace(scale * pace.kernels, scale * pace.host)
        free = _simulate(counted, times, card, None, pace)
    full = _simulate(counted, times, card, cluster, pace) if cluster else free
    step = full.end
    exposed = max(0.0, step - free.end)
    link = full.link_spread * exposed / step if step else 0.0
    if measured:
        own = (measured.percentile(90) - measured.percentile(10)) / (2 * Z80 * measured.median)
        spread = math.sqrt(own**2 + link**2 + STEP_SPREAD**2)
        return Timeline(step, spread, full.device, full.host, full.communication, exposed, 0.0)
    host_bound = max(0.0, 1.0 - full.device / step) if step else 0.0
    kernel = math.sqrt(full.variance) / full.device if full.device else 0.0
    spread = math.sqrt(
        (kernel * (1 - host_bound)) ** 2
        + (HOST_SPREAD * host_bound) ** 2
        + link**2
        + STEP_SPREAD**2
    )
    return Timeline(step, spread, full.device, full.host, full.communication, exposed)


class _simulate:
    """Runs the entries once, at one pace."""

    def __init__(
        self,
        counted: Counted,
        times: KernelTimes,
        card: Card,
        cluster: Cluster | None,
        pace: Pace,
    ) -> None:
        self.host = self.device = self.communication = self.variance = 0.0
        self.streams: dict[object, float] = {}  # stream or group -> when it is free
        reached: dict[int, float] = {}  # number of a mark or a collective -> when; before: 0
        by_kind: dict[str, float] = {}
        phase, more, unsure = "", {}, 0.0
        if "checkpointing" in counted.spec.recipe.techniques:
            more["forward"] = times.host_us["checkpointed"]
        launch = 0.0 if counted.replayed else pace.host
        for entry in counted.entries:
            if isinstance(entry, Kernel):
                if entry.phase != phase:
                    phase = entry.phase
                    self.host += launch * times.host_us.get(f"{phase} base", 0.0)
                self.host += launch * (times.host(entry) + more.get(entry.phase, 0.0) * entry.calls)
                us, spread = times.time(entry.call, card)
                us = pace.kernels * (us + GAP_US)
                begin = max(self.host, self.streams.get(entry.stream, 0.0))
                self.streams[entry.stream] = begin + us
                self.device += us
                by_kind[entry.call.kind] = by_kind.get(entry.call.kind, 0.0) + us * spread
            elif isinstance(entry, Sent):
                self.host += launch * times.host_us["collective"]
                us = spread = 0.0
                if cluster:
                    us, spread = cluster.time(entry.op, entry.ranks, entry.bytes, entry.stride)
                group = (entry.ranks, entry.stride)
                begin = max(self.host, self.streams.get(entry.stream, 0.0))
                begin = max(begin, self.streams.get(group, 0.0))
                self.streams[group] = reached[entry.number] = begin + us
                self.communication += us
                unsure += us * spread
            elif isinstance(entry, Mark):
                reached[entry.number] = self.streams.get(entry.stream, 0.0)
            else:
                until = reached.get(entry.number, 0.0)
                self.streams[entry.stream] = max(self.streams.get(entry.stream, 0.0), until)
        self.variance = (
            sum(value**2 for value in by_kind.values()) + (SHARED * sum(by_kind.values())) ** 2
        )
        self.link_spread = unsure / self.communication if self.communication else 0.0
        self.end = max([self.host, *self.streams.values()])

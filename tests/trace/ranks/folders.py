"""Folders of traces for tests: what every rank computes and exchanges, in milliseconds.

steps = [Step(compute=10, late=5), Step(compute=10)]
write_rank(folder, 0, 2, [...])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.trace.traces import Event, complete, op, range_, write_trace

MS = 1_000_000
BASE = 1_700_000_000_000_000_000
GLOO_THREAD = 200


@dataclass(frozen=True)
class Collective:
    """A collective of gloo in a step, in ms since the step began; `mib` of fp32."""

    begin: float
    end: float
    kind: str = "all_reduce"
    mib: float | None = 4.0
    call: str = "c10d::allreduce_"


@dataclass(frozen=True)
class Step:
    """One step of one rank: when operators ran, data was fetched, collectives went on."""

    length: float
    operators: Sequence[tuple[float, float]] = ()
    collectives: Sequence[Collective] = ()
    data: Sequence[tuple[float, float]] = ()
    names: Sequence[str] = ("aten::mm",)
    ranges: Sequence[tuple[str, float, float]] = field(default=())


def rank_events(steps: Sequence[Step], ahead_ms: float = 0.0) -> list[Event]:
    """Return the events of a rank whose clock is ahead."""
    events: list[Event] = []
    begin = ahead_ms * MS
    for number, step in enumerate(steps):
        start = round(begin)

        def at(ms: float, start: int = start) -> int:
            return start + round(ms * MS)

        def span(a: float, b: float) -> int:
            return round((b - a) * MS)

        events.append(range_(f"ProfilerStep#{number}", start, round(step.length * MS)))
        for index, (a, b) in enumerate(step.operators):
            events.append(op(step.names[index % len(step.names)], at(a), span(a, b)))
        events += [range_("data", at(a), span(a, b)) for a, b in step.data]
        events += [range_(name, at(a), span(a, b)) for name, a, b in step.ranges]
        for one in step.collectives:
            events.append(op(one.call, at(one.begin), 0))
            events.append(gloo(one, at(one.begin), span(one.begin, one.end)))
        begin += step.length * MS
    return events


def gloo(one: Collective, start: int, duration: int) -> Event:
    """Return the range of gloo's thread."""
    event = complete("user_annotation", f"gloo:{one.kind}", start, duration, tid=GLOO_THREAD)
    if one.mib is not None:
        event["args"] = {"Input Dims": [[int(one.mib * 2**18)]], "Input type": ["float"]}
    return event


def write_rank(
    folder: Path,
    rank: int,
    ranks: int,
    events: Sequence[Event],
    *,
    name: str = "rank{}.json",
    host: str = "one",
    groups: int = 1,
    told: bool = True,
    **more: object,
) -> Path:
    """Write the trace of one rank, which tells its rank if it is `told`; `more` are properties."""
    info = {"rank": rank, "world_size": ranks, "pg_count": groups} if told else {}
    properties = {"distributedInfo": info, "host_name": host, **more}
    folder.mkdir(parents=True, exist_ok=True)
    return write_trace(folder / name.format(rank), events, base=BASE, properties=properties)


def write_ranks(folder: Path, *ranks: Sequence[Step], **options: object) -> Path:
    """Write one trace for each rank, which are all on one machine; return the folder."""
    for rank, steps in enumerate(ranks):
        write_rank(folder, rank, len(ranks), rank_events(steps), **options)
    return folder

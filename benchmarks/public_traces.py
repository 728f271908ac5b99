"""Counts the device's time in PyTorch traces from elsewhere and compares it with `explain`.

Shares no code with steplab: the whole file is decoded, intervals are sorted and joined, times are
exact decimals. Every trace of a folder is counted for each of its steps and explained once; a
difference above 0.1 %, a step that only one of the two knows, a failure, or more than ten seconds
of CPU time is an error (exit code 1). public_traces.md lists the traces of the published table.

    python benchmarks/public_traces.py FOLDER [--out public_traces.md]
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

AGREE = 0.001  # of the larger number
DUST = 1e-6  # ms; a nanosecond is the resolution of the newest traces
PATIENCE = 10.0  # seconds for one trace
KERNELS = ("kernel", "mtia_ccp_events")
COPIES = ("gpu_memcpy", "memcpy", "gpu_memset", "memset")
OPERATORS = ("cpu_op", "operator")
RANGES = ("user_annotation", *OPERATORS)  # old traces have ranges among the operators
CALLS = re.compile(r"runtime$|driver$")
OTHERS = ("python_function", "gpu_user_annotation")

Interval = tuple[int, int]  # ns


@dataclass(frozen=True)
class Step:
    """One step, or all of a recording; milliseconds."""

    number: int
    wall: float
    kernels: float  # while any kernel ran; without a GPU, while any operator or collective ran
    busy: float  # while anything ran on the device
    summed: float  # all kernels added up, over all streams


def read_events(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the complete events of a trace and the name of its device."""
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    # Times stay text: a float of microseconds since 1970 is off by up to 0.25 us.
    content = json.loads(raw.decode(errors="replace"), strict=False, parse_float=str)
    properties = content.get("deviceProperties") if isinstance(content, dict) else None
    events = content["traceEvents"] if isinstance(content, dict) else content
    names = [str(one.get("name", "")) for one in properties or ()]
    device = next((name for name in names if name), "")
    timed = [event for event in events if event.get("name") == "[memory]" or "dur" in event]
    return timed, device


def interval(event: dict[str, Any]) -> Interval:
    """Return start and end of an event, rounded to nanoseconds."""
    start = round(Decimal(event["ts"]) * 1000)
    return start, start + max(0, round(Decimal(event.get("dur", 0)) * 1000))


def of(events: Iterable[dict[str, Any]], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events of some categories."""
    return [event for event in events if str(event.get("cat", "")).lower() in kinds]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, sorted."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


def inside(intervals: Iterable[Interval], start: int, end: int) -> float:
    """Return the milliseconds of intervals within a window."""
    return sum(max(0, min(b, end) - max(a, start)) for a, b in intervals) / 1e6


def windows(events: Sequence[dict[str, Any]]) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of every step: by its mark, by updates, or the recording."""
    ranges = of(events, RANGES)
    marks = {}
    for event in ranges:
        if match := re.fullmatch(r"ProfilerStep#(\d+)", str(event["name"])):
            marks[interval(event)] = int(match[1])
    if marks:
        # Two threads that mark the same step: the longer mark counts.
        kept: list[Interval] = []
        for mark in sorted(marks, key=lambda mark: mark[0] - mark[1]):
            if all(mark[1] <= start or end <= mark[0] for start, end in kept):
                kept.append(mark)
        steps = [(marks[mark], *mark) for mark in sorted(kept)]
        yield from by_device(events, steps) or steps
        return
    updates: dict[str, list[int]] = {}
    for event in ranges:
        if str(event["name"]).startswith("Optimizer.step#"):
            updates.setdefault(str(event["name"]), []).append(interval(event)[1])
    ends = sorted(max(updates.values(), key=len)) if updates else []
    if len(ends) >= 3:
        yield from ((n, *border) for n, border in enumerate(pairwise(ends)))
        return
    known = of(events, (*KERNELS, *COPIES, *RANGES, *OTHERS))
    known += [event for event in events if CALLS.search(str(event.get("cat", "")).lower())]
    known += [event for event in events if event["name"] == "[memory]"]
    times = [interval(event) for event in known]
    yield 0, min(start for start, _ in times), max(end for _, end in times)


def by_device(
    events: Sequence[dict[str, Any]], steps: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Return steps by the ends of their work if the host marks them before the device has begun.

    That is so where the work in a mark was launched before it. Nothing if it is not.
    """
    calls = {}
    for event in events:
        if CALLS.search(str(event.get("cat", "")).lower()):
            calls.setdefault(event.get("args", {}).get("correlation"), interval(event)[0])
    ends: dict[int, int] = {}
    own, all_ = dict.fromkeys(range(len(steps)), 0), dict.fromkeys(range(len(steps)), 0)
    for event in of(events, (*KERNELS, *COPIES)):
        begin, end = interval(event)
        called = calls.get(event.get("args", {}).get("correlation"), -1)
        for n, (_, low, high) in enumerate(steps):
            launched_here = low <= called <= high
            if launched_here:
                ends[n] = max(end, ends.get(n, 0))
            if low <= begin < high:
                all_[n] += end - begin
                own[n] += (end - begin) * launched_here
    shares = [own[n] / all_[n] for n in own if all_[n]]
    if len(shares) < 2 or statistics.median(shares) > 0.3 or len(ends) < len(steps):
        return []
    return [(steps[n][0], ends[n - 1], ends[n]) for n in range(1, len(steps))]


def count(events: Sequence[dict[str, Any]]) -> tuple[Step, ...]:
    """Return the device's time in every step; without a device, that of the operators."""
    copies = [interval(event) for event in of(events, COPIES)]
    kernels = [interval(event) for event in of(events, KERNELS)]
    if not kernels and not copies:
        # Operators, and the collectives of gloo, which have threads of their own.
        named = [event for event in of(events, OPERATORS) if not _is_range(str(event["name"]))]
        named += [event for event in of(events, RANGES) if str(event["name"]).startswith("gloo:")]
        kernels = [interval(event) for event in named]
    union, busy = joined(kernels), joined(kernels + copies)
    return tuple(
        Step(n, (b - a) / 1e6, inside(union, a, b), inside(busy, a, b), inside(kernels, a, b))
        for n, a, b in windows(events)
    )


def _is_range(name: str) -> bool:
    """Whether an event among the operators is a range that torch itself opens."""
    return name.startswith(("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#"))


def explained(path: Path) -> tuple[dict[str, Any], float]:
    """Return what `steplab explain --json` prints, and the seconds of CPU time that it took.

    Raises RuntimeError with its message if it fails.
    """
    command = [sys.executable, "-m", "steplab", "explain", str(path), "--json"]
    before = _children_seconds()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
    return json.loads(done.stdout), _children_seconds() - before


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare(path: Path) -> tuple[list[str], list[str]]:
    """Return the row of one trace, and what is wrong with it."""
    events, device = read_events(path)
    mine = {step.number: step for step in count(events)}
    said, seconds = explained(path)
    budget = said["budget"]
    wrong, worst, typical = [], 0.0, None
    left_out = len(mine) - len(budget["steps"])
    if left_out and not any("left out" in note for note in budget["notes"]):
        wrong.append(f"{len(mine)} steps counted, {len(budget['steps'])} explained")
    for step in budget["steps"]:
        if step["number"] not in mine:
            wrong.append(f"step {step['number']} is none")
            continue
        own, terms = mine[step["number"]], step["terms"]
        kernels = terms["kernels"] + terms["communication"]
        pairs = {
            "wall": (own.wall, step["wall_ms"]),
            "kernels": (own.kernels, kernels),
            "busy": (own.busy, kernels + terms["copies"]),
        }
        for name, (a, b) in pairs.items():
            difference = abs(a - b) / max(a, b) if abs(a - b) > DUST else 0.0
            worst = max(worst, difference)
            if difference > AGREE:
                wrong.append(f"{name} of step {own.number}: {a:.4f} counted, {b:.4f} explained")
        if typical is None or step["wall_ms"] == said["step_ms"]:
            typical = own
    if seconds > PATIENCE:
        wrong.append(f"{seconds:.0f} s")
    residual = max(abs(_residual(step)) for step in budget["steps"])
    unit = "step" if budget["marked"] else "recording"
    cells = [
        path.name,
        device or ("not named" if budget["on_device"] else "CPU"),
        f"{len(budget['steps'])} of {len(mine)}" if left_out else str(len(mine)),
        unit,
        *(f"{ms:.4g}" for ms in (typical.wall, typical.summed, typical.kernels, typical.busy)),
        f"{100 * worst:.4f}",
        f"{100 * residual:.1f}",
        f"{seconds:.1f}",
        ", ".join(finding["rule"] for finding in said["findings"]) or "-",
    ]
    return cells, wrong


def _residual(step: dict[str, Any]) -> float:
    """Return the share of a step that no term of the budget explains."""
    left = step["wall_ms"] - sum(step["terms"].values())
    return left / step["wall_ms"] if step["wall_ms"] else 0.0


TITLES = (
    *("trace", "device", "steps", "unit", "wall ms", "kernels added up ms", "any kernel ms"),
    *("busy ms", "worst difference %", "worst residual %", "seconds", "findings"),
)


def main() -> int:
    """Compare all traces of a folder; print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=None, help="also write the table here")
    args = parser.parse_args()
    paths = sorted(p for p in args.folder.iterdir() if p.name.endswith((".json", ".json.gz")))
    lines = ["| " + " | ".join(TITLES) + " |", "|" + "---|" * len(TITLES)]
    faults = 0
    for path in paths:
        try:
            cells, wrong = compare(path)
        except RuntimeError as error:
            cells, wrong = [path.name], [str(error)]
        lines.append("| " + " | ".join(cells) + " |")
        faults += bool(wrong)
        for problem in wrong:
            print(f"{path.name}: {problem}", flush=True)
    lines.append(f"\n{len(paths)} traces, {faults} with a disagreement")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

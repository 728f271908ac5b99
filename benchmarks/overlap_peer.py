"""How much communication is hidden: `explain` beside HolisticTraceAnalysis, on traces of ranks.

    PYTHONPATH=src python benchmarks/overlap_peer.py FOLDER... --peer PYTHON [--out FILE]

Each folder has one trace per rank. HolisticTraceAnalysis runs in a Python of its own. A third count
judges between the two; it shares no code with either (see public_traces.py): of the kernels that
were launched in a marked step, the share of communication during which another kernel ran.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from public_traces import CALLS, RANGES, Interval, interval, joined, of, read_events, windows

from steplab.cli.command import Parser
from steplab.core import Cell, Column, Table
from steplab.core.errors import SteplabError, UserError
from steplab.report.export import write_table
from steplab.report.terminal import print_table

PEER = """
import json, sys
from hta.trace_analysis import TraceAnalysis
if __name__ == "__main__":
    analysis = TraceAnalysis(trace_dir=sys.argv[1], include_last_profiler_step=True)
    found = analysis.get_comm_comp_overlap(visualize=False)
    pairs = zip(found["rank"].tolist(), found["comp_comm_overlap_pctg"].tolist())
    print(json.dumps(dict(pairs)))
"""
COLUMNS = (
    Column("traces"),
    Column("rank"),
    Column("communication", "ms"),
    Column("counted", "%"),
    Column("explain", "%"),
    Column("HTA", "%"),
)


def main() -> int:
    """Compare, print the table and write it where asked; return the exit code."""
    parser = Parser("overlap_peer.py", "Hidden communication beside HolisticTraceAnalysis.")
    parser.add_argument("folders", nargs="+", type=Path, help="folders with one trace per rank")
    parser.add_argument("--peer", required=True, help="Python that has HolisticTraceAnalysis")
    parser.add_argument("--out", type=Path, help="also write the table here (.md, .json or .csv)")
    try:
        args = parser.parse(sys.argv[1:])
        table = compare(args)
        print_table(table)
        if args.out:
            write_table(table, args.out)
    except SteplabError as error:
        print(f"overlap_peer.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def compare(args: argparse.Namespace) -> Table:
    """Return a row per trace."""
    rows: list[tuple[Cell, ...]] = []
    for folder in args.folders:
        command = [sys.executable, "-m", "steplab", "explain", str(folder), "--json"]
        ranks = output_of(command)["ranks"]["by_rank"]
        theirs = output_of([args.peer, "-c", PEER, str(folder)])
        for one in ranks:
            hidden, whole = count(folder / one["file"])
            rows.append(
                (
                    "/".join(folder.resolve().parts[-2:]),
                    one["rank"],
                    whole / 1e6,
                    100 * hidden / whole if whole else None,
                    None if one["overlap"] is None else 100 * one["overlap"],
                    theirs.get(str(one["rank"])),
                )
            )
    note = "share of the communication of the recorded steps behind which another kernel runs"
    return Table("hidden communication", COLUMNS, tuple(rows), note)


def output_of(command: list[str]) -> dict[str, Any]:
    """Return the JSON in the last line, or in all, of what a command prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{command[0]} fails: {done.stderr.strip().splitlines()[-1]}")
    text = done.stdout.strip()
    found: dict[str, Any] = json.loads(text if text.startswith("{") else text.splitlines()[-1])
    return found


def count(path: Path) -> tuple[int, int]:
    """Return ns of communication behind which another kernel ran, and of all communication."""
    events, _ = read_events(path)
    calls = [event for event in events if CALLS.search(str(event.get("cat", "")).lower())]
    called = {event.get("args", {}).get("correlation"): interval(event)[0] for event in calls}
    steps = list(launching(events))
    sent, other = [], []
    for event in of(events, ("kernel",)):
        launch = called.get(event.get("args", {}).get("correlation"), -1)
        if any(low <= launch < high for low, high in steps):
            (sent if "nccl" in event["name"].lower() else other).append(interval(event))
    sent, other = joined(sent), joined(other)
    return sum(overlaps(sent, other)), sum(end - start for start, end in sent)


def launching(events: list[dict[str, Any]]) -> Iterator[Interval]:
    """Yield when the host launched the steps; where nothing marks them, when they ran."""
    marks = {event["name"]: interval(event) for event in of(events, RANGES)}
    for number, low, high in windows(events):
        yield marks.get(f"ProfilerStep#{number}", (low, high))


def overlaps(ours: Iterable[Interval], theirs: list[Interval]) -> Iterator[int]:
    """Yield ns that intervals of two sorted lists have in common."""
    for start, end in ours:
        yield from (max(0, min(end, b) - max(start, a)) for a, b in theirs)


if __name__ == "__main__":
    sys.exit(main())

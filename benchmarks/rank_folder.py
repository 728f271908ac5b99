"""How long a folder of ranks takes to explain, in how much memory, beside HolisticTraceAnalysis.

    PYTHONPATH=src python benchmarks/rank_folder.py [--ranks N] [--megabytes N] [--peer PYTHON]
        [--folder DIR] [--out FILE]

Every tool runs as a command of its own; its time has imports in it, and its memory is the most that
all its processes had together, sampled 20 times a second (Linux only). The peer loads the folder
and computes the overlap of communication and computation, which is part of what `explain` prints.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trace_files import record_sample, write_trace_file

from steplab.cli.command import Parser
from steplab.core import Cell, Column, Table
from steplab.core.errors import SteplabError
from steplab.probes.environment import capture_environment
from steplab.report.export import write_table
from steplab.report.terminal import print_table

PEER = """
import sys
from hta.trace_analysis import TraceAnalysis
if __name__ == "__main__":
    analysis = TraceAnalysis(trace_dir=sys.argv[1], include_last_profiler_step=True)
    print(analysis.get_comm_comp_overlap(visualize=False))
"""
SAMPLE_SECONDS = 0.05
LONGEST_SECONDS = 540
COLUMNS = (
    Column("tool"),
    Column("ranks"),
    Column("each", "MB"),
    Column("events"),
    Column("time", "s"),
    Column("processor time", "s"),
    Column("peak memory", "GiB"),
    Column("ended"),
)


def main() -> int:
    """Measure, print the table and write it where asked; return the exit code."""
    parser = Parser("rank_folder.py", "How long a folder of ranks takes to explain.")
    parser.add_argument("--ranks", type=int, default=8, help="traces in the folder")
    parser.add_argument("--megabytes", type=int, default=100, help="size of each")
    parser.add_argument("--peer", default="", help="Python that has HolisticTraceAnalysis")
    parser.add_argument("--folder", type=Path, help="where the files are made, and removed")
    parser.add_argument("--out", type=Path, help="also write the table here (.md, .json or .csv)")
    try:
        args = parser.parse(sys.argv[1:])
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            table = measure(args, Path(folder))
        print_table(table)
        if args.out:
            write_table(table, args.out)
    except SteplabError as error:
        print(f"rank_folder.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measure(args: argparse.Namespace, folder: Path) -> Table:
    """Return a row per tool."""
    sample, events = record_sample(), 0
    traces = folder / "traces"
    traces.mkdir()
    for rank in range(args.ranks):
        path = traces / f"rank{rank}.json"
        events += write_trace_file(path, args.megabytes, sample, rank, args.ranks)
    tools = {"steplab explain": [sys.executable, "-m", "steplab", "explain", str(traces)]}
    if args.peer:
        program = folder / "peer.py"
        program.write_text(PEER, encoding="utf-8")
        tools["HolisticTraceAnalysis"] = [args.peer, str(program), str(traces)]
    rows: list[tuple[Cell, ...]] = []
    for tool, command in tools.items():
        seconds, busy, peak, ended = run(command)
        about = (tool, args.ranks, args.megabytes, events)
        rows.append((*about, seconds, busy, peak / 2**30, ended))
        print(*rows[-1], file=sys.stderr, flush=True)
    machine = capture_environment().conditions_on("cpu")
    note = f"load average when done: {os.getloadavg()[0]:.1f}\n{machine}"
    return Table("explaining a folder of ranks", COLUMNS, tuple(rows), note)


def run(command: list[str]) -> tuple[float, float, int, str]:
    """Return seconds, those of processors, bytes of all processes at their peak, how it ended."""
    begin, used, peak = time.perf_counter(), processor_seconds(), 0
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        while child.poll() is None and time.perf_counter() - begin < LONGEST_SECONDS:
            peak = max(peak, memory_of_session(child.pid))
            time.sleep(SAMPLE_SECONDS)
        seconds = time.perf_counter() - begin
        if child.poll() is None:
            os.killpg(child.pid, 9)
            child.wait()
            return seconds, processor_seconds() - used, peak, f"stopped after {LONGEST_SECONDS} s"
    ended = "well" if child.returncode == 0 else f"with code {child.returncode}"
    return seconds, processor_seconds() - used, peak, ended


def processor_seconds() -> float:
    """Return what all processes that were waited for have used."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def memory_of_session(leader: int) -> int:
    """Return the resident bytes of all processes of a session."""
    total = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and os.getsid(int(folder.name)) == leader:
                pages = (folder / "statm").read_text().split()[1]
                total += int(pages) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):  # it has just ended
            continue
    return total


if __name__ == "__main__":
    sys.exit(main())

"""How fast a trace is loaded and explained, in how much memory, beside HolisticTraceAnalysis.

    PYTHONPATH=src python benchmarks/trace_speed.py [--megabytes N ...] [--repeats N]
        [--peer PYTHON] [--folder DIR] [--out FILE]

Every load runs in a process of its own, which reports its time, without imports, and its peak
memory (Linux only). "Explained" is all of `steplab explain FILE` but its printing: load, attribute,
budget, every rule. `--peer` is a Python that has HolisticTraceAnalysis; by default, this one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from trace_files import record_sample, write_trace_file

from steplab.cli.command import Parser
from steplab.core import Cell, Column, Table
from steplab.core.errors import MeasurementError, SteplabError, UserError
from steplab.probes.environment import capture_environment
from steplab.report.export import write_table
from steplab.report.terminal import print_table

STEPLAB, EXPLAINED, PEER = "steplab", "steplab, explained", "HolisticTraceAnalysis"
IMPORTS = {
    STEPLAB: "from steplab.trace.load import load_trace",
    EXPLAINED: "from steplab.findings import case_of_trace, explain",
    PEER: "from hta.trace_analysis import TraceAnalysis",
}
LOADS = {
    STEPLAB: "load_trace(path)",
    EXPLAINED: "explain(case_of_trace(path))",
    PEER: "TraceAnalysis(trace_files={0: str(path)})",
}
# VmHWM, not getrusage: the latter starts with the memory of the process that started this one.
CHILD = """
import json, re, sys, time
from pathlib import Path
{imports}
path = Path(sys.argv[1])
wall, cpu = time.perf_counter(), time.process_time()
loaded = {load}
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print("\\n" + json.dumps({{"wall": wall, "cpu": cpu, "peak": int(peak[1]) * 1024}}))
"""
UNITS = [("file", "MB"), ("gzip", ""), ("events", ""), ("loaded by", ""), ("load", "s")]
UNITS += [("processor time", "s"), ("peak memory", "GiB"), ("load / steplab's", "")]


def main() -> int:
    """Measure, print the table and write it where asked; return the exit code."""
    parser = Parser("trace_speed.py", "How fast a trace is loaded, in how much memory.")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000], help="file sizes")
    parser.add_argument("--repeats", type=int, default=3, help="loads by steplab of every file")
    parser.add_argument("--peer", default=sys.executable, help="Python that has the peer")
    parser.add_argument("--folder", type=Path, help="where the files are made, and removed")
    parser.add_argument("--out", type=Path, help="also write the table here (.md, .json or .csv)")
    try:
        args = parser.parse(sys.argv[1:])
        if min(args.megabytes) < 1 or args.repeats < 1:
            raise UserError("--megabytes and --repeats must be at least 1.")
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            table = measure_all(args, Path(folder))
        print_table(table)
        if args.out:
            write_table(table, args.out)
    except SteplabError as error:
        print(f"trace_speed.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measure_all(args: argparse.Namespace, folder: Path) -> Table:
    """Return a row per file and tool."""
    sample = record_sample()
    version = _peer_version(args.peer)
    peer = args.peer if version else None
    rows: list[tuple[Cell, ...]] = []
    for megabytes in args.megabytes:
        plain = folder / "trace.json"
        events = write_trace_file(plain, megabytes, sample)
        packed = folder / "trace.json.gz"
        with plain.open("rb") as text, gzip.open(packed, "wb", 1) as file:
            shutil.copyfileobj(text, file, 1 << 20)
        size = plain.stat().st_size / 1e6
        rows += [(size, False, events, *row) for row in measure(plain, args.repeats, peer)]
        rows += [(size, True, events, *row) for row in measure(packed, args.repeats, None)]
    beside = f"{PEER} {version}: one load" if version else f"{PEER} is not installed"
    machine = capture_environment().conditions_on("cpu")
    return Table(
        title="Loading a trace with stacks, shapes, memory, launches, kernels and arrows",
        columns=tuple(Column(name, unit) for name, unit in UNITS),
        rows=tuple(rows),
        note=f"steplab: median of {args.repeats} loads, a process each. {beside}. "
        f"Load average when done: {os.getloadavg()[0]:.1f}.\n{machine}",
    )


def measure(path: Path, repeats: int, peer: str | None) -> list[tuple[Cell, ...]]:
    """Load and explain a file by steplab, and load it by the peer if there is one."""
    taken = {
        task: [_load(sys.executable, task, path) for _ in range(repeats)]
        for task in (STEPLAB, EXPLAINED)
    }
    wall = median(run["wall"] for run in taken[STEPLAB])
    rows: list[tuple[Cell, ...]] = []
    for task, runs in taken.items():
        took, cpu, peak = (median(run[key] for run in runs) for key in ("wall", "cpu", "peak"))
        rows.append((task, took, cpu, peak / 2**30, took / wall))
    if peer:
        try:
            run = _load(peer, PEER, path)
        except MeasurementError as error:
            print(f"trace_speed.py: {error}", file=sys.stderr)
            return [*rows, (f"{PEER} (failed)", None, None, None, None)]
        rows.append((PEER, run["wall"], run["cpu"], run["peak"] / 2**30, run["wall"] / wall))
    return rows


def _load(python: str, tool: str, path: Path) -> dict[str, float]:
    program = CHILD.format(imports=IMPORTS[tool], load=LOADS[tool])
    command = [python, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeasurementError(f"{tool} failed to load {path}: {done.stderr[-300:]}")
    read: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return read


def _peer_version(python: str) -> str:
    """Return the peer's version; "" if that Python cannot import it."""
    program = "import hta; from importlib import metadata as m; "
    program += "print(m.version(m.packages_distributions()['hta'][0]))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())

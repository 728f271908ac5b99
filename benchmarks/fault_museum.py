"""Every fault of examples/faults and its clean twin, profiled and explained on this machine.

    PYTHONPATH=src python benchmarks/fault_museum.py [EXHIBIT ...] [--out FILE] [--pack FILE]

An exhibit is right when its fault is named first, and nothing above a note is said of its clean
twin. Predicted gains are those of the finding, measured ones the faulty median less the clean
median (of memory: the peak of one step). Exhibits that need a GPU, or two, are rows without
numbers where there is none. `--pack` keeps the Runs with their traces, for tests. Twins whose Runs
lie in the `--store` already are judged by those, so an interrupted visit goes on where it was.

The rules were written with these exhibits in view: recall and precision here tell that nothing
was lost, not how the rules fare on other people's code.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from steplab.cli.command import Parser
from steplab.core import Cell, Column, Finding, Run, Table, units
from steplab.core.errors import SteplabError, UserError, did_you_mean
from steplab.findings import Case, case_of_run, explain, is_note
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.store.pack import pack_runs
from steplab.techniques.recipes import parse_recipe, shared_by
from steplab.trace.ranks.folder import rank_file

ROOT = Path(__file__).parents[1]
EXHIBITS = Path("examples/faults")
TWINS = ("faulty", "clean")
KEPT = ("trace_1.json.gz", "detail.json.gz")
# Nine recorded steps: a busy machine makes one rank late in some of them, and another in others.
RANKS_SCHEDULE = ("1", "2", "9", "1")
DEVICE_ARGUMENTS = ("device", "stream", "correlation", "bytes", "graph id", "grid")
# Arguments that steplab.trace.reading decodes, by kind of event.
READ_ARGUMENTS = {
    "cpu_op": (
        "Sequence number",
        "Fwd thread id",
        "Concrete Inputs",
        "Input type",
        "Input Strides",
        "Input Dims",
    ),
    "cuda_runtime": ("correlation",),
    "cuda_driver": ("correlation",),
    "kernel": DEVICE_ARGUMENTS,
    "gpu_memcpy": DEVICE_ARGUMENTS,
    "gpu_memset": DEVICE_ARGUMENTS,
    "python_function": (),
    "user_annotation": ("Input Dims", "Input type"),
    "gpu_user_annotation": (),
    "[memory]": ("Bytes", "Addr", "Total Allocated", "Device Type"),
}
READ_PROPERTIES = ("deviceProperties", "baseTimeNanoseconds", "distributedInfo", "host_name")
COLUMNS = (
    Column("fault"),
    Column("named first"),
    Column("named"),
    Column("of the clean twin"),
    Column("step faulty", "ms"),
    Column("step clean", "ms"),
    Column("predicted gain"),
    Column("measured gain"),
    Column("status"),
)


@dataclass(frozen=True)
class Exhibit:
    """One file of the museum, as its constants tell without importing it."""

    path: Path
    rule: str
    where: str  # "cpu" or "cuda"
    gpus: int = 1
    ranks: int = 1
    # By what the twins are compared: of the samples, or for a finding in bytes of the timeline.
    view: str = "median"
    memory: str = "peak_bytes"
    recipes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of each twin, in order
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    both: Sequence[str] = ()  # rules that speak of either twin


@dataclass(frozen=True)
class Verdict:
    """What explain says of one twin."""

    case: Case
    findings: tuple[Finding, ...]

    @property
    def large(self) -> list[str]:
        """Rules of the findings above a note."""
        return [f.rule for f in self.findings if not is_note(f, self.case)]

    def of(self, rule: str) -> Finding | None:
        """The finding of a rule."""
        return next((f for f in self.findings if f.rule == rule), None)


def main() -> int:
    """Visit the museum, print the table, write what is asked for; return the exit code."""
    parser = Parser("fault_museum.py", "Profile and explain every fault and its clean twin.")
    add = parser.add_argument
    add("only", nargs="*", metavar="EXHIBIT", help="names of files in examples/faults; none: all")
    add("--where", choices=("cpu", "cuda"), help="only the exhibits of one device")
    add("--steps", type=int, default=20, help="timed steps of each twin")
    add("--store", type=Path, default=None, help="folder to keep the Runs in")
    add("--pack", type=Path, default=None, help="pack the Runs and their traces into this file")
    add("--pack-limit", type=int, default=200, metavar="KB", help="largest Run to pack")
    add("--out", type=Path, nargs="*", default=[], help="write the table (.md, .csv, .json, .svg)")
    try:
        args = parser.parse(sys.argv[1:])
        check_suffixes(args.out)
        os.chdir(ROOT)
        with tempfile.TemporaryDirectory() as folder:
            table = visit(args, Store(args.store or folder))
        print_table(table)
        for path in args.out:
            write_table(table, path)
    except SteplabError as error:
        print(f"fault_museum.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def visit(args: argparse.Namespace, store: Store) -> Table:
    """Return one row per exhibit, and the two figures in the note."""
    here = gpu_count()
    rows: list[tuple[Cell, ...]] = []
    seen, kept = [], []
    for exhibit in exhibits(args.only):
        if args.where not in (None, exhibit.where):
            continue
        needed = exhibit.gpus if exhibit.where == "cuda" else 0
        if needed > here and not recorded(exhibit, args.steps, store):
            rows.append((exhibit.rule, *[""] * 7, f"not run: needs {needed} GPU"))
            continue
        print(f"{exhibit.path.stem} ...", file=sys.stderr, flush=True)
        try:
            twins = {twin: judged(exhibit, twin, args.steps, store) for twin in TWINS}
        except UserError as error:
            rows.append((exhibit.rule, *[""] * 7, f"failed: {error}"))
            continue
        rows.append(row(exhibit, twins["faulty"], twins["clean"]))
        seen.append((exhibit.rule, twins["faulty"], twins["clean"], exhibit.both))
        for one in twins.values():
            kept += [*one.case.others, *([one.case.run] if one.case.run else [])]
    if args.pack and kept:
        print(pack(store, kept, args.pack, args.pack_limit * 1000), file=sys.stderr)
    conditions = seen[0][1].case.run.environment.conditions if seen and seen[0][1].case.run else ""
    return Table("fault museum", COLUMNS, tuple(rows), f"{summary(seen)}\n{conditions}")


def exhibits(only: Sequence[str]) -> list[Exhibit]:
    """Read the constants of every file of the museum."""
    files = {path.stem: path for path in sorted(EXHIBITS.glob("*.py"))}
    for name in only:
        if name not in files:
            raise UserError(f"There is no exhibit {name!r}.", did_you_mean(name, files))
    known = {f for f in Exhibit.__dataclass_fields__ if f != "path"}
    found = []
    for name in only or files:
        body = ast.parse(files[name].read_text(encoding="utf-8")).body
        constants = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in known
        }
        found.append(Exhibit(files[name], **constants))
    return found


def judged(exhibit: Exhibit, twin: str, steps: int, store: Store) -> Verdict:
    """Profile one twin, with each of its recipes in turn, and explain the last Run."""
    for recipe in exhibit.recipes.get(twin, ("plain",)):
        if stored(exhibit, twin, recipe, steps, store):
            continue
        words = ["profile", f"{exhibit.path}:{twin}", "--recipe", recipe, "--steps", str(steps)]
        words += ["--device", exhibit.where, "--store", str(store.root)]
        if exhibit.ranks > 1:
            words += ["--ranks", str(exhibit.ranks), "--schedule", *RANKS_SCHEDULE]
        words += exhibit.flags.get(twin, ())
        done = subprocess.run(
            [sys.executable, "-m", "steplab", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise UserError(f"{twin}: {last[0]}")
    run = stored(exhibit, twin, recipe, steps, store)
    assert run is not None
    case = case_of_run(run, store)
    return Verdict(case, explain(case))


def recorded(exhibit: Exhibit, steps: int, store: Store) -> bool:
    """Tell whether the store has both twins, with every recipe."""
    return all(
        stored(exhibit, twin, recipe, steps, store)
        for twin in TWINS
        for recipe in exhibit.recipes.get(twin, ("plain",))
    )


def stored(exhibit: Exhibit, twin: str, recipe: str, steps: int, store: Store) -> Run | None:
    """Return the newest profile of this twin as it is asked for, if the store has one."""
    asked_recipe = shared_by(parse_recipe(recipe), exhibit.ranks)
    asked = (f"{exhibit.path}:{twin}", asked_recipe, exhibit.where, steps)
    for _, run in reversed(list(store.all())):
        if isinstance(run, Run) and run.status == "ok" and run.profile is not None:
            spec = run.spec
            if (spec.workload, spec.recipe, spec.device, spec.steps) == asked:
                return run
    return None


def row(exhibit: Exhibit, faulty: Verdict, clean: Verdict) -> tuple[Cell, ...]:
    """One line of the table."""
    finding = faulty.of(exhibit.rule)
    first = bool(faulty.findings) and faulty.findings[0].rule == exhibit.rule
    predicted, measured = gains(finding, faulty.case, clean.case, exhibit)
    return (
        exhibit.rule,
        first,
        ", ".join(f.rule for f in faulty.findings) or "nothing",
        ", ".join(rule for rule in clean.large if rule not in exhibit.both) or "nothing",
        faulty.case.step_ms,
        clean.case.step_ms,
        predicted,
        measured,
        "ok",
    )


def gains(finding: Finding | None, faulty: Case, clean: Case, exhibit: Exhibit) -> tuple[str, str]:
    """What the finding promises and what the clean twin gives, in ms or in bytes."""
    if finding is not None and finding.stake_bytes is not None:
        held = [getattr(case.timeline, exhibit.memory) for case in (faulty, clean)]
        return units.bytes_(finding.stake_bytes), units.bytes_(held[0] - held[1])
    expected = None if finding is None else finding.gain_ms
    clocks = [case.run.clock for case in (faulty, clean) if case.run and case.run.clock]
    before, after = (getattr(clock.step, exhibit.view) for clock in clocks)
    return units.milliseconds(expected), units.milliseconds(before - after)


def summary(seen: Sequence[tuple[str, Verdict, Verdict, Sequence[str]]]) -> str:
    """Recall and precision over the exhibits that ran."""
    if not seen:
        return "no exhibit ran"
    first = sum(bool(f.findings) and f.findings[0].rule == rule for rule, f, *_ in seen)
    named = sum(f.of(rule) is not None for rule, f, *_ in seen)
    false = sum(rule not in both for _, _, clean, both in seen for rule in clean.large)
    return (
        f"recall: {first} of {len(seen)} faults are named first, {named} are named at all\n"
        f"precision: {units.percent(named / max(named + false, 1))} "
        f"({false} findings above a note on {len(seen)} clean twins)"
    )


def pack(store: Store, runs: Sequence[Run], target: Path, limit: int) -> str:
    """Pack the Runs whose traces are small enough, without other files and paths of here."""
    with tempfile.TemporaryDirectory() as folder:
        small = Store(folder)
        for run in runs:
            names = [rank_file(name, rank) for rank in range(run.spec.ranks) for name in KEPT]
            there = [name for name in names if name in run.artifacts]
            files = {name: slim_trace(store.runs / run.id / name) for name in there}
            if sum(map(len, files.values())) <= limit:
                small.save(replace(run, command=()), files)
        return f"{pack_runs(small, small.ids(), target)} of {len(runs)} Runs packed into {target}"


def slim_trace(path: Path) -> bytes:
    """Return a compressed trace with what steplab reads of it, and paths relative to here.

    Arrows, metadata and most arguments are left out: two fifths of the size.
    """
    text = gzip.decompress(path.read_bytes())
    for here in (ROOT, path.parents[1].resolve()):
        text = text.replace(f"{here}/".encode(), b"")
    # Decimals, because a float has lost the nanoseconds.
    document = msgspec.json.Decoder(float_hook=Decimal).decode(text)
    events = (slim_event(event) for event in document["traceEvents"])
    document = {name: document[name] for name in READ_PROPERTIES if name in document}
    if "host_name" in document:
        document["host_name"] = "host"
    document["traceEvents"] = [event for event in events if event]
    slim = msgspec.json.Encoder(decimal_format="number").encode(document)
    return gzip.compress(slim, 9, mtime=0)


def slim_event(event: dict[str, Any]) -> dict[str, Any] | None:
    """Return an event with the arguments that the loader reads; None if it reads none of it."""
    kind = event.get("cat") if event.get("ph") == "X" else event.get("name")
    if kind not in READ_ARGUMENTS:
        return None
    args = event.get("args", {})
    kept = {name: args[name] for name in READ_ARGUMENTS[kind] if name in args}
    fields = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
    slim = {name: event[name] for name in fields if name in event}
    return {**slim, "args": kept} if kept else slim


def gpu_count() -> int:
    """How many GPUs torch sees, asked in a process of its own."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


if __name__ == "__main__":
    sys.exit(main())

"""Where the time and memory of HYDRA's training step go: the figures of docs/hydra.md.

    KINETO_LOG_LEVEL=6 PYTHONPATH=src python benchmarks/hydra_notes.py [SECTION ...] [--out FOLDER]

Sections: profile (time, memory, operators and copies of the model as it was profiled), routing
(the forms on one model), steps (recipes), scales (three sizes, routed and not), parts (layouts of
the convolutions and the value shift), data (synthetic and real tokens), first (first calls). A
cell that fails is a row with its reason. With --device cpu everything is tiny, as a rehearsal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra_parts

from steplab.cli.command import Parser
from steplab.engine.profiling.plan import Plan
from steplab.engine.profiling.session import profile_spec
from steplab.engine.trial import trial
from steplab.errors import SteplabError, UserError, did_you_mean
from steplab.explain.rows import Rows
from steplab.hardware.figures import utilisation
from steplab.record import Column, Run, Table
from steplab.record.table import Cell
from steplab.report.export import to_markdown, write_table
from steplab.spec import RunSpec
from steplab.techniques.parse import parse_recipe
from steplab.trace.stored import analyse_run
from steplab.workloads.workload import find_workload

EAGER = "precision=bf16,optimizer=fused"
GRAPH = f"{EAGER},cuda_graph=step"
COMPILED = f"{EAGER},compile=blocks"
BEST = "precision=bf16-weights,optimizer=one-pass,compile=blocks,cuda_graph=step"
# As the profiling script built it: token routing never switched on, depths chosen and masked.
AS_PROFILED: dict[str, Any] = {"mod": "dense", "mor": "masked"}
FORMS = (
    ("dense", "fixed"), ("top-k", "fixed"), ("soft", "soft"), ("dense", "masked"),
    ("top-k", "masked"), ("dense", "capacity"), ("top-k", "capacity"), ("dense", "packed"),
)  # fmt: skip
STEP = (
    *(Column("model"), Column("step", "ms"), Column("spread", "%"), Column("tokens/s")),
    *(Column("MFU", "%"), Column("peak", "GiB"), Column("forward", "ms"), Column("backward", "ms")),
    *(Column("clip+optimizer", "ms"), Column("compile", "s"), Column("status")),
)


@dataclass(frozen=True)
class Scale:
    """What is measured: the real sizes on a GPU, toys on a CPU."""

    device: str
    steps: int

    def spec(self, size: str, recipe: str, batch: int = 4, **changes: Any) -> RunSpec:
        """Return the spec of one cell, 1024 tokens a sequence."""
        if self.device == "cpu":
            size, batch, recipe = "tiny", 2, "precision=bf16"
            changes = {"context": 32, **changes}
        config = find_workload("hydra").resolve(size, changes)
        chosen = parse_recipe(recipe)
        return RunSpec(
            "hydra", config, size, batch=batch, recipe=chosen, device=self.device, steps=self.steps
        )


def main() -> int:
    """Measure the sections, print their tables; return the exit code."""
    parser = Parser("hydra_notes.py", "Where HYDRA's time and memory go.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--device", default="cuda", help="cuda, or cpu as a rehearsal")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a cell")
    parser.add_argument("--out", type=Path, help="folder for the tables as .md")
    try:
        args = parser.parse(sys.argv[1:])
        for name in args.sections or SECTIONS:
            if name not in SECTIONS:
                raise UserError(f"There is no section {name!r}.", did_you_mean(name, SECTIONS))
            started = time.perf_counter()
            show(SECTIONS[name](Scale(args.device, args.steps)), name, args)
            print(f"({name}: {time.perf_counter() - started:.0f} s)\n", flush=True)
    except SteplabError as error:
        print(f"hydra_notes.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def show(tables: Sequence[Table], name: str, args: argparse.Namespace) -> None:
    """Print tables, and write them where asked."""
    for number, table in enumerate(tables):
        print(to_markdown(table), flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            write_table(table, args.out / f"hydra_{name}_{number}.md")


def step_row(name: str, spec: RunSpec) -> tuple[Cell, ...]:
    """Measure one cell; a failure is a row."""
    run = trial(spec)
    if run.clock is None:
        return (name, *[None] * 9, f"{run.status}: {run.reason}"[:90])
    ms = run.clock.step.median
    phases = {phase: samples.median for phase, samples in run.clock.phases.items()}
    update = sum(phases.get(phase, 0.0) for phase in ("clip", "optimizer")) or None
    dtype = str(spec.recipe.techniques.get("precision", {}).get("dtype", "fp32"))[:4]
    work = run.work
    mfu = utilisation(work, ms, run.environment.device_name, dtype).mfu if work else None
    return (
        name,
        ms,
        100 * run.clock.step.spread,
        1e3 * spec.batch * int(spec.config["context"]) / ms,
        100 * mfu if mfu is not None else None,
        run.memory.peak / 2**30 if run.memory else None,
        phases.get("forward"),
        phases.get("backward"),
        update,
        run.compilation.first_seconds if run.compilation else None,
        run.status,
    )


def steps(scale: Scale) -> list[Table]:
    """The 100m model, top-k and fixed depth, under several recipes."""
    cells = [(f"100m B4 {recipe}", scale.spec("100m", recipe)) for recipe in (EAGER, GRAPH)]
    cells += [(f"100m B4 {recipe}", scale.spec("100m", recipe)) for recipe in (COMPILED, BEST)]
    cells.append((f"100m B16 {BEST}", scale.spec("100m", BEST, 16)))
    rows = tuple(step_row(*cell) for cell in cells)
    return [Table("Recipes on 100m, MoD top-k at 0.5, MoR fixed", STEP, rows)]


def routing(scale: Scale) -> list[Table]:
    """The forms on one model: same weights, same tokens, another route."""
    rows = []
    for mod, mor in FORMS:
        recipe = EAGER if mor == "packed" else GRAPH
        spec = scale.spec("100m", recipe, mod=mod, mor=mor)
        rows.append(step_row(f"mod={mod} mor={mor}{' (eager)' if mor == 'packed' else ''}", spec))
    title = "Routing forms on 100m, batch 4; static ones as CUDA graphs"
    return [Table(title, STEP, tuple(rows))]


def scales(scale: Scale) -> list[Table]:
    """Three sizes, every token and half of them."""
    rows = [
        step_row(f"{size} mod={mod}", scale.spec(size, EAGER, mod=mod))
        for size in ("100m", "500m", "1b")
        for mod in ("dense", "top-k")
    ]
    return [Table("Three sizes, batch 4, eager", STEP, tuple(rows))]


def profile(scale: Scale) -> list[Table]:
    """Time, memory, operators and copies of one step as it was profiled, but for its faults."""
    spec = scale.spec("as-profiled", EAGER, **AS_PROFILED)
    with tempfile.TemporaryDirectory() as folder:
        run = profile_spec(spec, Plan((1, 2, 3, 1)), Path(folder), lambda text: None)
        if run.clock is None or run.profile is None:
            cells = ((f"{run.status}: {run.reason}",),)
            return [Table("As profiled", (Column("status"),), cells)]
        analysis = analyse_run(run, Path(folder))
    assert analysis is not None
    rows = Rows(analysis)
    return [*phase_tables(run), *work_tables(rows)]


def phase_tables(run: Run) -> list[Table]:
    """Return where the time of a step goes, and what lies in memory at its peak."""
    assert run.clock is not None and run.profile is not None
    total = run.clock.step.median
    phases = [(name, s.median, 100 * s.median / total) for name, s in run.clock.phases.items()]
    phases.append(("step", total, 100.0))
    columns = (Column("phase"), Column("median", "ms"), Column("of the step", "%"))
    found = [Table("as-profiled: time", columns, tuple(phases))]
    memory = run.profile.memory
    if memory is not None:
        kinds = tuple((kind, held / 2**20) for kind, held in memory.peak_by_kind.items())
        held = Column("at the peak", "MiB")
        found.append(Table("as-profiled: memory", (Column("kind"), held), kinds))
        saved: dict[str, float] = {}
        for module, held_bytes in memory.saved_by_module.items():
            part = ".".join(module.split(".")[:2])
            saved[part] = saved.get(part, 0.0) + held_bytes / 2**20
        kept = Column("kept for backward", "MiB")
        found.append(Table("as-profiled: modules", (Column("module"), kept), tuple(saved.items())))
    return found


def work_tables(rows: Rows) -> list[Table]:
    """Return categories and operators by their own kernel time, and copies by source line."""
    every, copies = rows.inside, rows.category("copy", "memset")
    total = rows.ms(every)
    found = []
    for column, mask, title in (
        ("category", every, "kernel time by category"),
        ("op", every, "kernel time by operator"),
        ("line", copies, "copies and fills by source line"),
        ("op", copies, "copies and fills by operator"),
    ):
        groups = rows.groups(column, mask, 15)
        cells: list[tuple[Cell, ...]] = [
            (group.label, group.ms, 100 * group.ms / total, group.count) for group in groups
        ]
        rest = max(0.0, rows.ms(mask) - sum(group.ms for group in groups))
        cells.append(("the others", rest, 100 * rest / total, None))
        names = (Column(column), Column("ms"), Column("of kernel time", "%"), Column("calls"))
        found.append(Table(f"as-profiled: {title}", names, tuple(cells)))
    return found


SECTIONS: dict[str, Callable[[Scale], list[Table]]] = {
    "profile": profile,
    "routing": routing,
    "steps": steps,
    "scales": scales,
    "parts": lambda scale: hydra_parts.layouts(scale.device),
    "data": lambda scale: hydra_parts.data(scale.spec("100m", EAGER, 16, context=512)),
    "first": lambda scale: hydra_parts.first_calls(scale.spec("as-profiled", EAGER, **AS_PROFILED)),
}


if __name__ == "__main__":
    sys.exit(main())

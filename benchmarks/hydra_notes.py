"""Where the time and memory of HYDRA's training step go: the figures of docs/hydra.md.

    KINETO_LOG_LEVEL=6 PYTHONPATH=src python benchmarks/hydra_notes.py [SECTION ...] [--out FOLDER]

Sections, the most important first: steps (recipes on 100m, and the largest kernels of the best),
scales (every token and half of them on three sizes), routing (the forms on one model), compiled
(that alone), norms (the best step with its norms by kernels and by their definition, compiled),
kept (the best step with feed-forward layers that keep more and that keep less),
parts (convolutions, value shift and attention by themselves), profile (time, memory, operators and
copies of the model as it was profiled), data (synthetic and real tokens), first (first calls).
Every row is printed when it is measured; one that fails has its reason; after --seconds no new one
begins. With --device cpu everything is tiny, as a rehearsal.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hydra_parts
import torch
from hydra_cells import STEP, Desk, kernels, timed

from steplab.cli.command import Parser
from steplab.cli.flags import exit_without_gpu
from steplab.core import Cell, Column, Run, RunSpec, Table
from steplab.core.errors import SteplabError, UserError, did_you_mean
from steplab.findings.rows import Rows
from steplab.profiling.plan import ProfilePlan
from steplab.report.export import to_markdown, write_table
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload

EAGER = "precision=bf16,optimizer=fused"
GRAPH = f"{EAGER},cuda_graph=step"
COMPILED = f"{EAGER},compile=blocks"
BEST = "precision=bf16-weights,optimizer=one-pass,compile=blocks,cuda_graph=step"
DEFINED_NORMS = ",impl.stream_norm=reference,impl.rms_norm=aten"
# As the profiling script built it: token routing never switched on, depths chosen and masked.
AS_PROFILED: dict[str, Any] = {"mod": "dense", "mor": "masked"}
FORMS = (
    ("dense", "fixed"), ("top-k", "fixed"), ("top-k", "masked"), ("top-k", "capacity"),
    ("soft", "soft"), ("dense", "masked"), ("dense", "capacity"), ("dense", "packed"),
)  # fmt: skip


def main() -> int:
    """Measure the sections; return the exit code."""
    parser = Parser("hydra_notes.py", "Where HYDRA's time and memory go.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--device", default="cuda", help="cuda, or cpu as a rehearsal")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a cell")
    parser.add_argument("--seconds", type=float, default=170.0, help="after them no row begins")
    parser.add_argument("--out", type=Path, help="folder for the tables as .md")
    try:
        args = parser.parse(sys.argv[1:])
        for name in args.sections:
            if name not in SECTIONS:
                raise UserError(f"There is no section {name!r}.", did_you_mean(name, SECTIONS))
        if args.device == "cuda":
            exit_without_gpu(__file__)
        began = time.monotonic()
        desk = Desk(args.device, args.steps, began + args.seconds, args.out)
        device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        print(f"{device}, torch {torch.__version__}", flush=True)
        for name in args.sections or SECTIONS:
            SECTIONS[name](desk)
            print(f"\n({name}: done at {time.monotonic() - began:.0f} s)", flush=True)
    except SteplabError as error:
        print(f"hydra_notes.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def spec_of(desk: Desk, size: str, recipe: str, batch: int = 4, **changes: Any) -> RunSpec:
    """Return the spec of one cell, 1024 tokens a sequence; on a CPU a toy."""
    if desk.device == "cpu":
        size, batch, recipe = "tiny", 2, "precision=bf16"
        changes = {"context": 32, **changes}
    config = find_workload("hydra").resolve(size, changes)
    fields: dict[str, Any] = {"device": desk.device, "steps": desk.steps, "warmup": 2}
    return RunSpec("hydra", config, size, batch=batch, recipe=parse_recipe(recipe), **fields)


def steps(desk: Desk) -> None:
    """The 100m model, top-k and fixed depth, under several recipes."""
    sheet = desk.sheet("steps", "Recipes on 100m, MoD top-k at 0.5, MoR fixed", STEP)
    for batch in (4, 16):
        look = kernels(desk, f"Kernels of the best step, batch {batch}", f"kernels_b{batch}")
        spec = spec_of(desk, "100m", BEST, batch)
        sheet.row(f"B{batch} {BEST}", partial(timed, spec, desk.steps, batch == 4, look))
    for recipe in (EAGER, GRAPH):
        spec = spec_of(desk, "100m", recipe)
        sheet.row(f"B4 {recipe}", partial(timed, spec, desk.steps, True))


def compiled(desk: Desk) -> None:
    """What compilation gives by itself; apart, for it takes long."""
    sheet = desk.sheet("compiled", "Compiled blocks without a graph, 100m", STEP)
    spec = spec_of(desk, "100m", COMPILED)
    sheet.row(f"B4 {COMPILED}", partial(timed, spec, desk.steps))


def norms(desk: Desk) -> None:
    """The best step, and the same with its norms, sums and scores by definition, compiled.

    The definition keeps norms in fp32: compiled it moves a quarter more in a routed block than
    torch's own norm would (docs/hydra.md).
    """
    sheet = desk.sheet("norms", "Norms by kernels and by definition, 100m, batch 16", STEP)
    for name, more in (("kernels", ""), ("definition", DEFINED_NORMS)):
        look = kernels(desk, f"Kernels with norms by {name}", f"kernels_norms_{name}")
        spec = spec_of(desk, "100m", BEST + more, 16)
        sheet.row(f"B16 best, norms by {name}", partial(timed, spec, desk.steps, False, look))


def kept(desk: Desk) -> None:
    """The best step with feed-forward layers that keep h for the backward, and that do not."""
    sheet = desk.sheet("kept", "What feed-forward layers keep, 100m, batch 16", STEP)
    for impl in ("in_product_kept", "in_product"):
        spec = spec_of(desk, "100m", f"{BEST},impl.feed_forward={impl}", 16)
        sheet.row(f"B16 best, {impl}", partial(timed, spec, desk.steps))


def scales(desk: Desk) -> None:
    """Three sizes, every token and half of them."""
    sheet = desk.sheet("scales", "Every token and half of them, batch 4", STEP)
    for size, recipe in (("1b", BEST), ("1b", EAGER), ("100m", EAGER), ("500m", EAGER)):
        for mod in ("dense", "top-k"):
            named = recipe == BEST
            look = kernels(desk, f"Kernels of {size} {mod}", f"kernels_{size}_{mod}")
            spec = spec_of(desk, size, recipe, mod=mod)
            name = f"{size} mod={mod} {'best' if named else 'eager'}"
            sheet.row(name, partial(timed, spec, desk.steps, False, look if named else None))


def routing(desk: Desk) -> None:
    """The forms on one model: same weights, same tokens, another route."""
    title = "Routing forms on 100m, batch 4; static ones as CUDA graphs"
    sheet = desk.sheet("routing", title, STEP)
    for mod, mor in FORMS:
        recipe = EAGER if mor == "packed" else GRAPH
        spec = spec_of(desk, "100m", recipe, mod=mod, mor=mor)
        name = f"mod={mod} mor={mor}{' (eager)' if mor == 'packed' else ''}"
        sheet.row(name, partial(timed, spec, desk.steps, True))


def profile(desk: Desk) -> None:
    """Time, memory, operators and copies of one step as it was profiled, but for its faults."""
    if time.monotonic() > desk.deadline:
        print("\nprofile: no time left", flush=True)
        return
    spec = spec_of(desk, "as-profiled", EAGER, **AS_PROFILED)
    for number, table in enumerate(profile_tables(spec)):
        print(f"\n{to_markdown(table)}", flush=True)
        if desk.out:
            write_table(table, desk.out / f"hydra_profile_{number}.md")


def profile_tables(spec: RunSpec) -> list[Table]:
    """Return the tables of one profiled step, or one with the reason why there are none."""
    from steplab.profiling.recorder import profile_spec
    from steplab.trace.analyze import analyze_run

    with tempfile.TemporaryDirectory() as folder:
        run = profile_spec(spec, ProfilePlan((0, 1, 1, 1)), Path(folder), lambda text: None)
        if run.clock is None or run.profile is None:
            cells = ((f"{run.status}: {run.reason}",),)
            return [Table("As profiled", (Column("status"),), cells)]
        analysis = analyze_run(run, Path(folder))
    assert analysis is not None
    return [*phase_tables(run), *work_tables(Rows(analysis))]


def phase_tables(run: Run) -> list[Table]:
    """Return where the time of a step goes, and what lies in memory at its peak."""
    assert run.clock is not None and run.profile is not None
    one = run.clock.typical  # its phases add up, medians over all steps do not
    total = run.clock.step.values[one]
    times = {name: samples.values[one] for name, samples in run.clock.phases.items()}
    times["other"] = total - sum(times.values())
    phases = [(name, ms, 100 * ms / total) for name, ms in [*times.items(), ("step", total)]]
    columns = (Column("phase"), Column("median step", "ms"), Column("of the step", "%"))
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
        groups = rows.totals(column, mask, 15)
        cells: list[tuple[Cell, ...]] = [
            (group.label, group.ms, 100 * group.ms / total, group.count) for group in groups
        ]
        rest = max(0.0, rows.ms(mask) - sum(group.ms for group in groups))
        cells.append(("the others", rest, 100 * rest / total, None))
        names = (Column(column), Column("ms"), Column("of kernel time", "%"), Column("calls"))
        found.append(Table(f"as-profiled: {title}", names, tuple(cells)))
    return found


def first(desk: Desk) -> None:
    """First calls, in a process of their own: here everything has been loaded already."""
    script = str(Path(__file__).with_name("hydra_first.py"))
    out = [str(desk.out)] if desk.out else []
    subprocess.run([sys.executable, script, desk.device, *out], check=False)


SECTIONS: dict[str, Callable[[Desk], None]] = {
    "steps": steps,
    "scales": scales,
    "routing": routing,
    "compiled": compiled,
    "norms": norms,
    "kept": kept,
    "parts": hydra_parts.layouts,
    "profile": profile,
    "data": lambda desk: hydra_parts.data(desk, spec_of(desk, "100m", EAGER, 16, context=512)),
    "first": first,
}


if __name__ == "__main__":
    sys.exit(main())

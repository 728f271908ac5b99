"""The table of kernels by name: of all steps, or of one phase, range or module."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from steplab.core import Cell, Column, Table
from steplab.core.errors import UserError, did_you_mean
from steplab.core.units import fold_layer_numbers
from steplab.trace.analysis import Analysis, Floats, WorkTable
from steplab.trace.events import Ints
from steplab.trace.host_calls import find_launches
from steplab.trace.phases import AUTOGRAD_NODE
from steplab.trace.spans import nest

Mask = NDArray[np.bool_]
NAME_WIDTH = 110

_KERNEL_COLUMNS = (
    Column("Time", "%", 3),
    Column("Total", "ms"),
    Column("Instances", digits=9),
    Column("Per step"),
    *(Column(name, "us") for name in ("Avg", "Med", "Min", "Max", "StdDev")),
    Column("Name"),
)


def kernel_table(
    analysis: Analysis,
    phase: str | None = None,
    range_name: str | None = None,
    module: str | None = None,
    top: int | None = None,
) -> Table:
    """Return one row per kernel name, most time first, of the work launched inside steps.

    `module` includes the modules below it ("blocks.3" has "blocks.3.attention"), and * stands for
    any number ("blocks.*.attention"). All but the `top` longest are one row.
    """
    mask, where = _chosen(analysis, phase, range_name, module)
    work, steps = analysis.work, len(analysis.windows)
    groups = _by_name(work, mask)
    total = work.duration[mask].sum()
    shown = groups if top is None else groups[:top]
    rows = [
        _statistics(
            work.duration[r] / 1e3, total, steps, short_kernel_name(_text(work, work.name[r[0]]))
        )
        for r in shown
    ]
    rest = groups[len(shown) :]
    if rest:
        durations = work.duration[np.concatenate(rest)] / 1e3
        rows.append(_statistics(durations, total, steps, f"({len(rest)} others)"))
    what = "kernels" if analysis.budget.on_device else "operators"
    note = "" if analysis.budget.on_device else "Times of operators are without their children."
    return Table(f"{what}{where}, {_steps(steps)}", _KERNEL_COLUMNS, tuple(rows), note)


def phases_by_time(analysis: Analysis) -> tuple[str, ...]:
    """Return the phases that have work inside steps, most time first."""
    work = analysis.work
    inside = work.step >= 0
    spent = np.bincount(work.phase[inside], work.duration[inside], len(work.labels))
    present = np.unique(work.phase[inside])
    return tuple(work.labels[c] for c in present[np.argsort(-spent[present], kind="stable")])


def short_kernel_name(kernel: str, longest: int = NAME_WIDTH) -> str:
    """Return the name of a kernel without what all C++ kernels share, at most `longest` characters.

    The middle is left out, not the end, which often differs where the beginning is the same.
    """
    bare = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    bare = re.sub(r"\bat::native::|\bat::cuda::detail::", "", bare)
    # The parameters repeat the template arguments; "operator()()" and lambdas have no such list.
    bare = re.sub(r"(?<=>)\([^()]*\)$", "", bare)
    tail = longest // 3
    return bare if len(bare) <= longest else f"{bare[: longest - tail - 3]}...{bare[-tail:]}"


def _chosen(
    analysis: Analysis, phase: str | None, range_name: str | None, module: str | None
) -> tuple[Mask, str]:
    """Return the rows inside steps that fit, and words for the title."""
    work = analysis.work
    mask: Mask = work.step >= 0
    where = ""
    if phase is not None:
        _check("phase", phase, phases_by_time(analysis))
        mask = mask & (work.phase == work.labels.index(phase))
        where += f" of phase {phase}"
    if range_name is not None:
        mask = mask & _in_range(analysis, range_name)
        where += f" in range {range_name}"
    if module is not None:
        below = modules_below(analysis, module)
        if not below:
            _check("module", module, _modules(work))
        mask = mask & np.isin(work.module, [i for i, m in enumerate(work.labels) if m in below])
        where += f" of module {module}"
    return mask, where


def modules_below(analysis: Analysis, module: str) -> set[str]:
    """Return the modules of the trace that `module` names, with those inside them."""

    def fits(path: str) -> bool:
        return path == module or path.startswith(f"{module}.")

    numbered = "*" in module
    return {m for m in _modules(analysis.work) if fits(fold_layer_numbers(m) if numbered else m)}


def _modules(work: WorkTable) -> set[str]:
    return {_text(work, code) for code in np.unique(work.module).tolist()}


def _in_range(analysis: Analysis, name: str) -> Mask:
    """Return the work launched while a range was open on its thread, or, by autograd, on any."""
    trace = analysis.trace
    spans = trace.named(trace.ranges, name.__eq__)
    if not spans.any():
        _check("range", name, {trace.text(code) for code in np.unique(trace.ranges.name).tolist()})
    thread, time = _launch_points(analysis)
    nodes = trace.named(trace.ops, lambda op: op.startswith(AUTOGRAD_NODE))
    engine = np.isin(thread, np.unique(trace.ops.thread[nodes]))
    anywhere = nest(trace.ranges, spans, across_threads=True)
    meanwhile = anywhere.innermost(np.zeros_like(thread), time) >= 0
    return (nest(trace.ranges, spans).innermost(thread, time) >= 0) | (engine & meanwhile)


def _launch_points(analysis: Analysis) -> tuple[Ints, Ints]:
    if analysis.budget.on_device:
        launches = find_launches(analysis.trace)
        return launches.thread, launches.called
    ops = analysis.trace.ops
    return ops.thread.astype(np.int64), ops.start


def _check(kind: str, name: str, known: set[str] | tuple[str, ...]) -> None:
    if name not in known:
        raise UserError(f"The trace has no {kind} {name!r}.", did_you_mean(name, known))


def _by_name(work: WorkTable, mask: Mask) -> list[Ints]:
    """Return the rows of each name, the name with most time first."""
    rows = np.flatnonzero(mask)
    rows = rows[np.argsort(work.name[rows], kind="stable")]
    borders = np.flatnonzero(np.diff(work.name[rows])) + 1
    groups = np.split(rows, borders) if len(rows) else []
    return sorted(groups, key=lambda group: -int(work.duration[group].sum()))


def _statistics(us: Floats, total_ns: int, steps: int, name: str) -> tuple[Cell, ...]:
    std = float(us.std(ddof=1)) if len(us) > 1 else 0.0
    middle = (us.mean(), np.median(us), us.min(), us.max(), std)
    share = _percent(us.sum() * 1e3, total_ns)
    numbers = (share, float(us.sum()) / 1e3, len(us), len(us) / steps)
    return (*numbers, *(float(value) for value in middle), name)


def _percent(part: float, whole: float) -> float:
    return float(100 * part / whole) if whole else 0.0


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _text(work: WorkTable, code: int) -> str:
    return work.labels[code]

"""The outcome of a search: tables, the recipe as a file, the report. No torch."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.core import Cell, Column, Recipe, Setting, Table, units
from steplab.core.comparison import Change
from steplab.core.ladder import Ladder, Outcome, Peer, Rung, named_rungs
from steplab.core.output_file import write_output
from steplab.core.printable import printable
from steplab.findings import Case, explain
from steplab.report.export import write_table
from steplab.report.pages import write_ladder_page
from steplab.store import Store
from steplab.trace.analyze import analyze_run
from steplab.tune.ceilings import MIN_SHARE
from steplab.verify.shapes import FP32_TRUTH
from steplab.workloads.user_model import SCRIPT

RECIPE_FILE, REPORT_FILE, PICTURE_FILE = "recipe.toml", "report.html", "ladder.svg"
GIB = 2**30
MAX_SHOWN = 100.0  # the largest factor of speed that is written out
CANNOT_TELL: Outcome = "cannot tell"
# What the columns of the impact table are, for those who read it without the page.
EXPLAINED = {
    "speed-up": "speed-up over the best recipe so far, in turns by two live workers, with its "
    "interval at 95 % or more",
    "ceiling": "ceiling: the most it could gain by the time budget, at the speed of its turns, or "
    "of the nearest ones of the recipe below",
    "cold compile": "cold: first step with empty compile caches",
    "warm": "warm: first step with filled compile caches",
    "took": "took: trying it, profile of a winner included",
}


@dataclass(frozen=True)
class OutcomeFiles:
    """Where they are; no recipe where the baseline was not beaten."""

    report: Path
    recipe: Path | None


def write_outcome(ladder: Ladder, store: Store, folder: Path, flag: str) -> OutcomeFiles:
    """Write the winning recipe, the report and a picture into `folder`, which `flag` named."""
    recipe = folder / RECIPE_FILE
    spec = ladder.spec
    comments = [
        f"found by steplab tune: {spec.title}",
        total_line(ladder),
        ladder.environment.conditions_on(spec.device),
    ]
    write_recipe(ladder.winner, recipe, comments, flag)
    write_table(impact_table(ladder), folder / PICTURE_FILE, flag)
    tables = {
        "impact": impact_table(ladder),
        "why": reasons_table(ladder),
        "gate": gate_table(ladder),
        "untried": untried_table(ladder),
        "batches": batches_table(ladder),
    }
    run = store.load(ladder.winner_run or ladder.baseline_run)
    analysis = analyze_run(run, store.runs / run.id)
    findings = explain(Case(run, analysis))
    report = folder / REPORT_FILE
    text = recipe.read_text(encoding="utf-8")
    write_ladder_page(ladder, tables, text, run, analysis, findings, report, flag)
    won = ladder.winner != spec.recipe
    return OutcomeFiles(report, recipe if won else None)


def impact_table(ladder: Ladder) -> Table:
    """One row per rung in the order they were tried; over a red gate no speed-up is shown.

    Columns without any value are left out.
    """
    is_time = ladder.objective == "time"
    unit = "ms" if is_time else "GiB"
    columns = (
        Column("rung"),
        Column("outcome"),
        Column("gate"),
        Column("speed-up", whole=True),
        Column("step", "ms", dispensable=0 if is_time else 1),
        Column("peak memory", "GiB", 3, dispensable=1 if is_time else 0),
        Column("ceiling", unit, 3, dispensable=2),
        Column("gained", unit, 3),
        Column("cold compile", "s", 3, dispensable=3),
        Column("warm", "s", 3, dispensable=4),
        Column("took", "s", 3, dispensable=5),
    )
    rows = [_row(name, rung, ladder) for name, rung in named_rungs(ladder.rungs)]
    kept = [i for i in range(len(columns)) if i < 2 or any(row[i] != "-" for row in rows)]
    shown = tuple(tuple(row[i] for i in kept) for row in rows)
    title = f"performance impact on {ladder.spec.title}"
    has = tuple(columns[i] for i in kept)
    return Table(title, has, shown, _note(ladder, {column.name for column in has}))


def total_line(ladder: Ladder) -> str:
    """The winner against the baseline, in one sentence."""
    if ladder.has_winner_already:
        script = ladder.spec.workload.removeprefix(SCRIPT)
        return f"{ladder.winner.label}: {script} has this already: nothing to gain"
    if ladder.total is None or ladder.before is None or ladder.after is None:
        if ladder.winner != ladder.spec.recipe:
            return f"{ladder.winner.label}: the best so far, not yet compared with the baseline"
        if ladder.undecided:
            labels = ", ".join(rung.label for rung in ladder.undecided)
            verb = "is" if len(ladder.undecided) == 1 else "are"
            return f"no recipe surely beats the baseline; {labels} {verb} undecided"
        return "no recipe beats the baseline; it stays as it is"
    change = ladder.total
    if change.says_nothing:
        why = "the rounds of their turns have nothing in common"
        return f"{ladder.winner.label}: nobody can tell whether it beats the baseline; {why}"
    ms = f"{ladder.before.median:.4g} ms to {ladder.after.median:.4g} ms a step"
    gain = f"{speed_up(change)}x ({interval(change)}), {ms}"
    if ladder.objective == "time" and change.high >= 0:
        equal = f"surely gains less than {units.percent(MIN_SHARE)} over the baseline"
        told = equal if gains_nothing(change) else "no longer distinguishable from the baseline"
        gain = f"{told}: {gain}"
    return f"{ladder.winner.label}: {gain}"


def undecided_line(ladder: Ladder) -> str:
    """Which rungs are undecided; "" where there are none, or the total line says it."""
    if not ladder.undecided or ladder.total is None:
        return ""
    labels = ", ".join(rung.label for rung in ladder.undecided)
    return f"undecided: {labels}; a larger --budget has the time to tell"


def gains_nothing(change: Change) -> bool:
    """Whether the whole interval is below what is worth a try."""
    return change.low > -MIN_SHARE


def outlier_lines(ladder: Ladder) -> list[str]:
    """What was far slower than usual in the turns of the winner and the baseline, and why."""
    sides = {"winner": ladder.after, "baseline": ladder.before}
    lines = {name: samples.outliers for name, samples in sides.items() if samples is not None}
    return [f"{name}, {line}" for name, line in lines.items() if line]


def padding_line(ladder: Ladder) -> str:
    """How much of the batch is padding, what packing could gain at most, and what it asks for."""
    share, step = ladder.padding, ladder.after or ladder.before
    most = f"at most {1 / (1 - share):.2f}x the tokens/s"
    if step is not None:
        whole = units.milliseconds(step.median)
        most += f", {units.milliseconds(share * step.median)} of {whole} a step"
    return (
        f"{units.percent(share)} of the batch is padding, by its {ladder.padding_told_by}; packing "
        f"several sequences into a row gives {most}. No recipe does it: positions must begin anew "
        "in each sequence, the mask keep them apart, and no token predict the first of the next one"
    )


def peer_line(peer: Peer) -> str:
    """The winner against the peer, in one sentence."""
    if peer.change is None or peer.theirs is None or peer.ours is None:
        return f"{peer.recipe.label} could not be measured: {peer.reason}"
    name, speed = peer.recipe.label, speed_up(peer.change)
    times = f"{peer.ours.median:.4g} ms a step, {name} {peer.theirs.median:.4g} ms"
    return f"{speed} times as fast as {name} ({interval(peer.change)}): {times}"


def gain_text(change: Change) -> str:
    """`1.31x (1.25 to 1.37)`; where the interval leaves everything open, that nobody can tell."""
    return CANNOT_TELL if change.says_nothing else f"{speed_up(change)}x ({interval(change)})"


def speed_up(change: Change) -> str:
    """The change in time as a factor of speed."""
    return f"{1 / (1 + change.value):.2f}"


def interval(change: Change) -> str:
    """The interval of the factor, from the slow end to the fast one."""
    return f"{_bounded(1 / (1 + change.high))} to {_bounded(1 / (1 + change.low))}"


def _bounded(factor: float) -> str:
    """Three rounds that have little in common leave an interval of any width."""
    return f"more than {MAX_SHOWN:g}" if factor > MAX_SHOWN else f"{factor:.2f}"


def _row(name: str, rung: Rung, ladder: Ladder) -> tuple[Cell, ...]:
    shown, objective = rung.gain if rung.green else None, ladder.objective
    after = rung.after.median if shown and rung.after else None
    return (
        name,
        rung.outcome,
        _gate(rung),
        gain_text(shown) if shown else "-",
        _cell(after),
        _cell(None if rung.memory is None else rung.memory / GIB, 3),
        _cell(_ceiling(rung, ladder), 3),
        _cell(_gained(rung, objective), 3),
        _cell(rung.cold_seconds, 3),
        _cell(rung.warm_seconds, 3),
        _cell(rung.seconds or None, 3),
    )


def _gate(rung: Rung) -> str:
    """Whether it passed; waits that the recipe below has too are allowed, but not hidden."""
    if not rung.green:
        return "red" if rung.checks else "not reached"
    return f"green, waits {units.counted(rung.waits, 'time')}" if rung.waits else "green"


def _ceiling(rung: Rung, ladder: Ladder) -> float | None:
    """Return the most that a rung could gain: GiB, or ms of its turns.

    Where it had none, those of the nearest turns of the recipe below: the profile that told the
    share may be of a busier minute.
    """
    if ladder.objective == "memory":
        return None if rung.ceiling is None else rung.ceiling / GIB
    if rung.before is not None or rung.ceiling_share is None:
        return rung.ceiling
    place, seen = ladder.rungs.index(rung), []
    for number, other in enumerate(ladder.rungs):
        turns = other.before if other.below == rung.below else None
        turns = other.after if other.recipe == rung.below else turns
        if turns is not None:
            seen.append((abs(number - place), turns.median))
    return rung.ceiling_share * min(seen)[1] if seen else rung.ceiling


def _gained(rung: Rung, objective: str) -> float | None:
    """Milliseconds, or GiB, that the step is better off; nothing over a red gate."""
    if not rung.green or rung.before is None or rung.after is None or rung.gain is None:
        return None
    if objective == "time":
        return None if rung.gain.says_nothing else -rung.gain.value * rung.before.median
    if rung.memory is None or rung.memory_before is None:
        return None
    return (rung.memory_before - rung.memory) / GIB


def _cell(value: float | None, digits: int = 4) -> Cell:
    return "-" if value is None else float(f"{value:.{digits}g}")


def _note(ladder: Ladder, columns: Container[str]) -> str:
    """Say how the numbers came about; of columns, those that there are."""
    lines = [
        "; ".join(words for name, words in EXPLAINED.items() if name in columns),
        f"numerics against {truth_of(ladder)} {'; '.join(ladder.gate_shapes)}",
        ladder.environment.conditions_on(ladder.spec.device),
    ]
    if ladder.contention:
        lines.append(f"{ladder.contention}, so gains are less certain")
    if ladder.spec.ranks > 1:
        lines.insert(1, "step: of the slowest rank; peak memory: the most of any rank")
    return "\n".join(lines)


def truth_of(ladder: Ladder) -> str:
    """Return what the numerics were compared with."""
    return "fp32" if all(FP32_TRUTH in words for words in ladder.gate_shapes) else "fp64"


def expectation(rung: Rung) -> str:
    """The most that a rung could gain, and of what; "" where that is not known."""
    if rung.ceiling_share is None:
        return ""
    return f"at most {rung.ceiling_share * 100:.0f} % ({rung.ceiling_parts or 'nothing'})"


def reasons_table(ladder: Ladder, all_rungs: bool = True) -> Table:
    """Why each rung was tried and ended as it did, with its remedy; or why some went wrong."""
    wrong = ("failed", "red gate")
    named = named_rungs(ladder.rungs)
    shown = [(n, r) for n, r in named if all_rungs or r.outcome in wrong or r.remedy]
    rows = [(name, expectation(rung), rung.reason, rung.remedy or "-") for name, rung in shown]
    names = ("rung", "could gain", "reason", "remedy")
    kept = [0, 1, 2, 3] if all_rungs else [0, 2, 3]
    return Table(
        "why",
        tuple(Column(names[i]) for i in kept),
        tuple(tuple(row[i] for i in kept) for row in rows),
    )


def batches_table(ladder: Ladder) -> Table:
    """The winner at its best batch, and what makes room for a larger one; empty without both."""
    rows = tuple(
        (
            trial.recipe.label,
            trial.batch,
            trial.outcome,
            _cell(trial.tokens_per_second),
            _cell(None if trial.memory is None else trial.memory / GIB, 3),
            gain_text(trial.change) if trial.change else "-",
            trial.cost or "-",
            trial.reason,
        )
        for trial in ladder.batches
    )
    columns = (
        Column("recipe"),
        Column("batch"),
        Column("outcome"),
        Column("tokens/s"),
        Column("peak memory", "GiB", 3, dispensable=2),
        Column("tokens/s against the winner's"),
        Column("cost", dispensable=1),
        Column("reason"),
    )
    return Table("at the best batch of each", columns, rows)


def batch_line(ladder: Ladder) -> str:
    """Say at which batch there are the most tokens per second, and with which recipe."""
    own, *savers = ladder.batches
    kept = [trial for trial in savers if trial.outcome == "kept" and trial.change]
    if not kept:
        more = ", and nothing that makes room for more pays" if savers else ""
        return f"most tokens/s at batch {own.batch} ({own.reason}{more})"
    best = min(kept, key=lambda trial: trial.change.value if trial.change else 0.0)
    assert best.change is not None
    gain = f"{speed_up(best.change)}x ({interval(best.change)})"
    return (
        f"most tokens/s at batch {best.batch} with {best.recipe.label}: {gain} of the winner's at "
        f"batch {own.batch} ({best.cost})"
    )


def untried_table(ladder: Ladder) -> Table:
    """Suggestions that were not tried, and why."""
    tried = {rung.label for rung in ladder.rungs}
    rows = tuple((u.label, u.reason) for u in ladder.untried if u.label not in tried)
    return Table("not tried", (Column("suggestion"), Column("reason")), rows)


def gate_table(ladder: Ladder) -> Table:
    """Every check of every rung."""
    named = [("baseline", ladder.baseline_checks)]
    named += [(name, rung.checks) for name, rung in named_rungs(ladder.rungs)]
    named += [(f"{t.recipe.label} at batch {t.batch}", t.checks) for t in ladder.batches]
    rows = tuple(
        (label, check.name, "passed" if check.passed else "RED", check.detail)
        for label, checks in named
        for check in checks
    )
    return Table(
        "gate", (Column("rung"), Column("check"), Column("result"), Column("detail")), rows
    )


def write_recipe(
    recipe: Recipe, path: Path, comments: Sequence[str] = (), flag: str = "--out"
) -> None:
    """Write one table of settings per technique; `comments` come first; `flag` named the path."""
    # Printable: TOML allows no control characters in comments either.
    lines = [f"# {printable(' '.join(comment.split()))}" for comment in comments]
    for name, settings in sorted(recipe.techniques.items()):
        lines += ["", f"[{name}]", *(f"{key} = {_toml_value(v)}" for key, v in settings.items())]
    write_output(path, ("\n".join(lines) + "\n").encode(), flag)


def _toml_value(value: Setting) -> str:
    """A number, a bool or a string: TOML writes them as JSON does."""
    return json.dumps(value)

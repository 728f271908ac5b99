"""What is left of a search: the recipe as a file, and the report. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steplab.explain import Case, explain
from steplab.record.ladder import Ladder
from steplab.report.export import write_table
from steplab.report.pages import write_ladder_page
from steplab.store import Store
from steplab.trace.stored import analyse_run
from steplab.tune.impact import gate_table, impact_table, reasons_table, total_line, untried_table
from steplab.tune.recipe_file import write_recipe

RECIPE_FILE, REPORT_FILE, PICTURE_FILE = "recipe.toml", "report.html", "ladder.svg"


@dataclass(frozen=True)
class Files:
    """Where they are; no recipe where the baseline was not beaten."""

    report: Path
    recipe: Path | None


def write_outcome(ladder: Ladder, store: Store, folder: Path) -> Files:
    """Write the winning recipe, the report and a picture of its table into `folder`."""
    recipe = folder / RECIPE_FILE
    spec = ladder.spec
    comments = [
        f"found by steplab tune: {spec.workload} {spec.size}, batch {spec.batch}, {spec.mode}",
        total_line(ladder),
        ladder.environment.conditions_on(spec.device),
    ]
    write_recipe(ladder.winner, recipe, comments)
    write_table(impact_table(ladder), folder / PICTURE_FILE)
    tables = {
        "impact": impact_table(ladder),
        "why": reasons_table(ladder),
        "gate": gate_table(ladder),
        "untried": untried_table(ladder),
    }
    run = store.load(ladder.winner_run or ladder.baseline_run)
    analysis = analyse_run(run, store.runs / run.id)
    findings = explain(Case(run, analysis))
    report = folder / REPORT_FILE
    text = recipe.read_text(encoding="utf-8")
    write_ladder_page(ladder, tables, text, run, analysis, findings, report)
    won = ladder.winner != spec.recipe
    return Files(report, recipe if won else None)

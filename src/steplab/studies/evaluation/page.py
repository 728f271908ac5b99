"""An evaluation as one self-contained page: ratios, a window of every group, both tables."""

from __future__ import annotations

from pathlib import Path

from steplab.report.cells import cell_text
from steplab.report.pages.conditions import paragraphs, tiles
from steplab.report.pages.document import Section, write_page
from steplab.report.pages.tables import table_html
from steplab.studies.evaluation.panels import panels_html
from steplab.studies.evaluation.ratio_chart import ratios_html
from steplab.studies.evaluation.study import Outcome
from steplab.studies.evaluation.tables import metrics_table, ratios_table, verdict


def write_evaluation_page(outcome: Outcome, path: Path) -> None:
    """Write a page that needs nothing but itself."""
    found = outcome.evaluation
    one, metrics, ratios = found.overall, metrics_table(found), ratios_table(found)
    figures = {
        "MASE over all windows": cell_text(one.model.mase),
        "of seasonal naive": cell_text(one.naive.mase),
        "geometric mean of the groups' ratios": cell_text(one.geometric["MASE"]),
        "groups in which the model is better": f"{one.won['MASE']} of {one.groups}",
    }
    sections = [
        Section("ratios", "MASE against seasonal naive", ratios_html(found), verdict(found)),
        Section("windows", "The first window of every group", panels_html(outcome.examples)),
        Section("metrics", "Metrics", table_html(metrics)),
        Section("all-ratios", ratios.title.capitalize(), table_html(ratios)),
    ]
    foot = paragraphs([line for line in (metrics.title, found.conditions) if line])
    write_page(path, f"Evaluation of {found.model}", tiles(figures), sections, foot)

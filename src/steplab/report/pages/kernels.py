"""Tables of kernels, one per phase."""

from __future__ import annotations

from dataclasses import replace

from steplab.record import Table
from steplab.report.pages.markup import Html, element, join
from steplab.report.pages.tables import table_html
from steplab.trace.analysis import Analysis
from steplab.trace.kernel_table import kernel_table, phases_of

MOST_KERNELS = 25  # of one phase; the rest is one row
MOST_PHASES = 12  # foreign traces may have hundreds of ranges


def kernels_html(analysis: Analysis) -> Html:
    """Return one table per phase, the longest phase first and open."""
    parts = []
    for number, phase in enumerate(phases_of(analysis)[:MOST_PHASES]):
        table = _name_first(kernel_table(analysis, phase=phase, top=MOST_KERNELS))
        total = sum(row[2] for row in table.rows if isinstance(row[2], (int, float)))
        per_step = total / max(len(analysis.windows), 1)
        count = element("span", f"{per_step:.4g} ms per step")
        title = element("summary", phase, count)
        opened = "" if number == 0 else None
        parts.append(element("details", title, table_html(table), open=opened))
    return join(parts)


def _name_first(table: Table) -> Table:
    """Move the name from the last column to the first, which is what a narrow screen shows."""
    rows = tuple((row[-1], *row[:-1]) for row in table.rows)
    return replace(table, columns=(table.columns[-1], *table.columns[:-1]), rows=rows)

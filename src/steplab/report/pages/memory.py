"""Memory over one step: the picture, what was held at the peak, what is saved for backward."""

from __future__ import annotations

from steplab.record.memory_timeline import MemoryTimeline
from steplab.report.memory import memory_svg, memory_tables
from steplab.report.pages.markup import Html, element, join
from steplab.report.pages.tables import table_html


def memory_html(timeline: MemoryTimeline) -> Html:
    """Return the picture of the timeline with its tables; the first is open."""
    # The drawing escapes its own texts.
    parts = [element("div", Html(memory_svg(timeline)), class_="picture")]
    for number, table in enumerate(memory_tables(timeline)):
        opened = "" if number == 0 else None
        title = element("summary", table.title)
        parts.append(element("details", title, table_html(table), open=opened))
    return join(parts)

"""The page of `explain`: the budget, then what is in the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steplab.record import Finding, Run
from steplab.report.pages.document import write_page
from steplab.report.pages.sections import (
    budget_section,
    findings_section,
    page_foot,
    page_head,
    page_title,
    step_ms_of,
    timeline_section,
)
from steplab.trace.analysis import Analysis


def write_explain_page(
    run: Run | None,
    analysis: Analysis | None,
    findings: Sequence[Finding],
    path: Path,
    trace: str = "",
) -> None:
    """Write budget, findings and timeline of a Run, or of a trace that is no Run's.

    `trace` is the name of such a trace.
    """
    sections = [
        budget_section(run, analysis),
        findings_section(findings, step_ms_of(run, analysis)),
        timeline_section(analysis),
    ]
    title = trace or page_title(run, analysis)
    write_page(path, title, page_head(run), sections, page_foot(run, analysis))

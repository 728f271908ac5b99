"""The page of a profile: where the time and the memory of a step went."""

from __future__ import annotations

from pathlib import Path

from steplab.record import Run
from steplab.report.pages.document import write_page
from steplab.report.pages.sections import (
    budget_section,
    categories_section,
    findings_section,
    kernels_section,
    memory_section,
    page_foot,
    page_head,
    page_title,
    roofline_section,
    step_ms_of,
    timeline_section,
)
from steplab.trace.analysis import Analysis


def write_profile_page(run: Run | None, analysis: Analysis | None, path: Path) -> None:
    """Write everything that the traces and the Run tell as one self-contained file."""
    sections = [
        budget_section(run, analysis),
        timeline_section(analysis),
        categories_section(analysis),
        kernels_section(analysis),
        memory_section(run),
        roofline_section(run, analysis),
    ]
    if run is not None and run.findings:
        sections.append(findings_section(run.findings, step_ms_of(run, analysis)))
    write_page(path, page_title(run, analysis), page_head(run), sections, page_foot(run, analysis))

"""Self-contained HTML pages: no network, nothing to install, safe against hostile names."""

from steplab.report.pages.compare import write_compare_page
from steplab.report.pages.ladder import write_ladder_page
from steplab.report.pages.runs import write_explain_page, write_profile_page, write_runs_page

__all__ = [
    "write_compare_page",
    "write_explain_page",
    "write_ladder_page",
    "write_profile_page",
    "write_runs_page",
]

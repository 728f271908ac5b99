"""Findings: faults of a stored Run or of any trace, with evidence and remedy. No torch."""

from steplab.findings.case import Case, case_of_folder, case_of_run, case_of_trace
from steplab.findings.findings import Findings, gain_share, is_note
from steplab.findings.rank import explain

__all__ = [
    "Case",
    "Findings",
    "case_of_folder",
    "case_of_run",
    "case_of_trace",
    "explain",
    "gain_share",
    "is_note",
]

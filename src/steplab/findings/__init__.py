"""Findings: faults of a stored Run or of any trace, with evidence and remedy. No torch."""

from steplab.findings.case import Case, case_of_run, case_of_trace
from steplab.findings.rank import explain, gain_share, is_note

__all__ = ["Case", "case_of_run", "case_of_trace", "explain", "gain_share", "is_note"]

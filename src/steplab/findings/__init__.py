"""What a stored Run, or a trace of any origin, says about itself. No torch."""

from steplab.findings.case import Case, case_of_run, case_of_trace
from steplab.findings.rank import explain, is_note, share

__all__ = ["Case", "case_of_run", "case_of_trace", "explain", "is_note", "share"]

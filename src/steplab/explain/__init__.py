"""What a stored Run, or a trace of any origin, says about itself. No torch."""

from steplab.explain.case import Case
from steplab.explain.explain import explain, is_note, share
from steplab.explain.open import case_of_run, case_of_trace

__all__ = ["Case", "case_of_run", "case_of_trace", "explain", "is_note", "share"]

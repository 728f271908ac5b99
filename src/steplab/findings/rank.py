"""Runs every rule over a case, lets no time be claimed twice, and ranks the findings."""

from __future__ import annotations

from steplab.core import Finding, Run, registry
from steplab.findings.case import Case, case_of_run
from steplab.findings.claims import settled
from steplab.findings.findings import Findings


def explain(subject: Case | Run) -> Findings:
    """Return the Findings of a case, the largest gain first, notes last; print them to read them.

    A Run brings its traces if this process has profiled or loaded it, or if it is in the default
    store. A rule is a file in `rules/` whose `RULE` takes a Case and returns a Finding, several,
    or None.
    """
    case = subject if isinstance(subject, Case) else case_of_run(subject)
    found: list[Finding] = []
    for name in registry.names("steplab.findings.rules", "RULE"):
        result = registry.load("steplab.findings.rules", name, "RULE")(case)
        found += result if isinstance(result, tuple) else [result] if result else []
    return Findings.of(settled(found, case), case)

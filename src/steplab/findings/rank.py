"""Runs every rule over a case, lets no time be claimed twice, and ranks the findings."""

from __future__ import annotations

from pathlib import Path

from steplab.core import Finding, Run, registry
from steplab.core.errors import UserError
from steplab.core.input_file import shorten
from steplab.findings.case import Case, case_of_folder, case_of_run, case_of_trace
from steplab.findings.claims import settled
from steplab.findings.findings import Findings

TAKES = (
    "steplab.explain takes a Run, a trace or a folder of traces; `steplab explain` also takes the "
    "name of a stored Run."
)


def explain(subject: Case | Run | Path | str) -> Findings:
    """Return the Findings of a case, the largest gain first, notes last; print them to read them.

    A Run brings its traces if this process has profiled or loaded it, or if it is in the default
    store. A path is a trace of any origin, or a folder of one per rank. A rule is a file in
    `rules/` whose `RULE` takes a Case and returns a Finding, several, or None.
    """
    case = _case_of(subject)
    found: list[Finding] = []
    for name in registry.names("steplab.findings.rules", "RULE"):
        result = registry.load("steplab.findings.rules", name, "RULE")(case)
        found += result if isinstance(result, tuple) else [result] if result else []
    return Findings.of(settled(found, case), case)


def _case_of(subject: Case | Run | Path | str) -> Case:
    if isinstance(subject, Case):
        return subject
    if isinstance(subject, Run):
        return case_of_run(subject)
    if not isinstance(subject, (str, Path)):
        raise UserError(f"Nothing can be explained by a {type(subject).__name__}.", TAKES)
    path = Path(subject)
    if not path.exists():
        raise UserError(f"There is no file {shorten(path)}.", TAKES)
    return case_of_folder(path) if path.is_dir() else case_of_trace(path)

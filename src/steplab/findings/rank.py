"""Runs every rule over a case and ranks the findings."""

from __future__ import annotations

from steplab.core import Finding, Run, registry
from steplab.findings.case import Case, case_of_run

NOTE_SHARE = 0.03  # of the step, or of the device's memory


def explain(subject: Case | Run) -> tuple[Finding, ...]:
    """Return the Findings of a case, the largest gain first, notes last.

    A Run is opened with its traces if it is in the default store. A rule is a file in `rules/`
    whose `RULE` takes a Case and returns a Finding, several, or None.
    """
    case = subject if isinstance(subject, Case) else case_of_run(subject)
    found: list[Finding] = []
    for name in registry.names("steplab.findings.rules", "RULE"):
        result = registry.load("steplab.findings.rules", name, "RULE")(case)
        found += result if isinstance(result, tuple) else [result] if result else []
    return tuple(sorted(found, key=lambda finding: _rank(finding, case)))


def _rank(finding: Finding, case: Case) -> tuple[bool, float, bool]:
    """Notes after findings, small after large, noise of the machine after faults of the code."""
    noise = finding.rule == "noisy_measurement"
    return is_note(finding, case), -(gain_share(finding, case) or 0.0), noise


def gain_share(finding: Finding, case: Case) -> float | None:
    """Return the expected gain of the remedy, over the step's time or the device's memory.

    Where the gain has no number, what is at stake; None where that is unknown too.
    """
    ms = finding.stake_ms if finding.gain_ms is None else finding.gain_ms
    if ms is not None and case.step_ms > 0:
        return ms / case.step_ms
    if finding.stake_bytes is not None and case.capacity_bytes:
        return finding.stake_bytes / case.capacity_bytes
    return None


def is_note(finding: Finding, case: Case) -> bool:
    """Whether a Finding is too small to act on; one of unknown size is not."""
    part = gain_share(finding, case)
    return part is not None and part < NOTE_SHARE

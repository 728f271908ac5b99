"""Run every rule over a Run and rank what they find."""

from __future__ import annotations

from steplab import shelf
from steplab.record import Finding, Run


def explain(run: Run) -> tuple[Finding, ...]:
    """Return the Findings of a Run, the most milliseconds at stake first.

    A rule is a file in `rules/` whose `RULE` takes a Run and returns a Finding or None.
    """
    names = shelf.names("steplab.explain.rules", "RULE")
    found = [shelf.load("steplab.explain.rules", name, "RULE")(run) for name in names]
    ranked = sorted(filter(None, found), key=lambda finding: -(finding.stake_ms or 0.0))
    return tuple(ranked)

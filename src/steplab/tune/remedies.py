"""What to do about a rung that could not be climbed. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.record import Run
from steplab.record.ladder import Check
from steplab.techniques.parse import technique

MORE_TIME = "a larger --budget"
_STATUS = {
    "oom": "a smaller --batch, or --objective memory, which tries checkpointing and bf16",
    "timeout": MORE_TIME,
    "crashed": "try it alone with steplab bench step --recipe, and read what it prints",
    "failed": "try it alone with steplab bench step --recipe",
}
_CHECKS = {
    "no synchronisation": "keep the values on the device; steplab lint names the lines",
    "no new graphs after warm-up": "keep shapes and Python values the same from step to step",
    "memory within the limit": "a smaller --batch or a larger --memory-limit",
    "clocks agree": "measure again on a quiet machine",
}
_NUMERICS = "do not use it: it computes something else than the plain step does"
_UNVERIFIED = "make the reference tell: seed the batches, use a smaller shape"


def remedy_for_run(run: Run, name: str) -> str:
    """Return a remedy for a Run that did not end well; its reason may have told one already."""
    return technique(name).remedy(run) or _STATUS.get(run.status, "")


def remedy_for_slower(run: Run, name: str) -> str:
    """Return what the technique knows of a step that it made slower."""
    return technique(name).remedy(run)


def remedy_for_checks(checks: Sequence[Check]) -> str:
    """Return a remedy for the first check that has not passed."""
    first = next((check for check in checks if not check.passed), None)
    if first is None:
        return ""
    if first.detail.startswith("unverified"):
        return _UNVERIFIED
    return _CHECKS.get(first.name, _NUMERICS)


def remedy_for_turns() -> str:
    """Return a remedy for a candidate that was lost beside the champion: both must fit."""
    return _STATUS["oom"]

"""Small tensors are made on the host and copied to the device, one by one.

What it sees: eight or more copies a step from the host of at most 4 KiB each, and the waits for
launches before and after them.
Why it costs: each blocks the host until the device has caught up; it is no longer ahead.
Remedy: Python numbers in place of `torch.tensor(x, device=...)`; constants as buffers; one copy for
all.
When it is wrong: the copies are pinned, asynchronous and hidden; then they cost nothing here.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows

MANY = 8  # a step
SMALL = 4096  # bytes
SHARE = 0.01
NEAR_NS = 100_000  # between the end of a copy and a wait for it


def check(case: Case) -> Finding | None:
    """Add up small copies, and the waits around them."""
    rows = case.rows
    if rows is None or case.analysis is None or not case.on_device:
        return None
    from_host = rows.labeled("name", lambda name: name.startswith("Memcpy HtoD"))
    small = from_host & (case.analysis.trace.device.bytes <= SMALL)
    if rows.count(small) < MANY:
        return None
    behind = _next(rows, small)
    lost = case.launched_ms(small | behind) - rows.ms(behind & ~small) + _waited_ms(case, small)
    if not lost > SHARE * case.step_ms:
        return None
    return Claim(
        rule="host_scalars",
        claim=f"{rows.count(small):.0f} small tensors a step are copied from the host: "
        f"{units.milliseconds(lost)}",
        evidence=rows.hot_lines(small),
        remedy="use the Python number itself instead of torch.tensor(x, device=...), keep "
        "constants as buffers, or copy all at once",
        stake_ms=lost,
        why="each copy holds the host up until the device has caught up",
        gain_ms=lost,
        work=small,
    )


def _next(rows: Rows, mask: Mask) -> Mask:
    """Return the work that follows each of these."""
    found: Mask = np.zeros_like(mask)
    found[np.minimum(np.flatnonzero(mask) + 1, len(mask) - 1)] = True
    return found & rows.inside


def _waited_ms(case: Case, small: Mask) -> float:
    """Return the idle time per step that waits of such copies caused."""
    assert case.analysis is not None and case.rows is not None
    analysis = case.analysis
    syncs, ends = analysis.syncs, analysis.work.start[small] + analysis.work.duration[small]
    place = np.searchsorted(np.sort(ends), syncs.start + syncs.duration, "right")
    ordered = np.append(0, np.sort(ends))[place]
    near = (syncs.step >= 0) & (syncs.start - ordered < NEAR_NS)
    return float(syncs.idle[near].sum()) / 1e6 / case.rows.steps


RULE = check

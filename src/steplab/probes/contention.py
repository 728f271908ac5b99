"""How long threads of this process could have run, but had no core."""

from __future__ import annotations

from pathlib import Path

TASKS = Path("/proc/self/task")  # one folder for each thread


def seconds_without_core(tasks: Path = TASKS) -> float | None:
    """Return the sum over the living threads so far; None where the kernel does not tell.

    The second number of `schedstat` is a thread's time on a run queue, in nanoseconds.
    """
    waited = []
    for path in tasks.glob("*/schedstat"):
        try:
            waited.append(int(path.read_text().split()[1]))
        except (OSError, IndexError, ValueError):  # it has just ended, or nothing is counted
            continue
    return sum(waited) / 1e9 if waited else None

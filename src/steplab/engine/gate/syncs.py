"""Lines of a step in which the host waits for the device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from steplab.probes.probe import Subject

WORDS = "called a synchronizing CUDA operation"  # torch's, in sync debug mode


def waiting_lines(subject: Subject) -> list[str]:
    """Run one step and return `folder/file.py:12` for every wait; nothing without a GPU."""
    if not subject.on_cuda:
        return []
    batch = next(subject.feed)  # what fetching it waits for is no matter of the step
    with _reported() as seen:
        subject.step(batch)
    told = [w for w in seen if WORDS in str(w.message)]
    return [f"{'/'.join(Path(w.filename).parts[-2:])}:{w.lineno}" for w in told]


@contextlib.contextmanager
def _reported() -> Iterator[list[warnings.WarningMessage]]:
    """Let torch warn of every wait that it knows of."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode(before)

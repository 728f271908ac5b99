"""One run per folder: two would remove each other's checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from steplab.errors import UserError
from steplab.store.atomic import disk_errors

LOCK_FILE = ".lock"


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the system lets go of it when the process ends.

    Where the system has no such locks (Windows), nothing is held.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with disk_errors(folder, "--checkpoint-dir"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Another run is writing to {folder}.", "Give this one another --checkpoint-dir."
            ) from None
        yield

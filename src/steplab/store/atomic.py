"""Files that are complete or absent, no matter when the process is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from steplab.core.errors import UserError


def write_file(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name, flush it to disk, then move it into place."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_output(path: Path, data: bytes, flag: str = "--out") -> None:
    """Write a file that a user asked for, and the folders above it; `flag` named the path."""
    with disk_errors(path.parent, flag):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_errors(folder: Path, remedy: str = "--store") -> Iterator[None]:
    """Turn a full disk or a read-only folder into one sentence; `remedy` is the flag to change."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = "the disk is full"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            problem = "no permission to write there"
        else:
            problem = error.strerror or str(error)
        raise UserError(
            f"Cannot write to {folder}: {problem}.", f"Choose another place with {remedy}."
        ) from error

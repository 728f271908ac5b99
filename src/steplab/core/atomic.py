"""Files that are complete or absent, no matter when the process is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from steplab.core.errors import UserError
from steplab.core.input_file import shorten

# What file systems answer that cannot flush a folder (network mounts, FUSE).
CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def draft_name(path: Path) -> Path:
    """Return a new hidden name beside `path`.

    It is short: a long name with a few letters more would be too long.
    """
    return path.with_name(f".draft-{secrets.token_hex(8)}")


@contextlib.contextmanager
def draft_file(path: Path) -> Iterator[Path]:
    """Yield a new name beside `path` to write to; then flush that file and move it into place."""
    draft = draft_name(path)
    try:
        yield draft
        move_file(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def move_file(source: Path, path: Path) -> None:
    """Flush a file to disk, then move it into place on the same disk."""
    with source.open("rb+") as file:
        os.fsync(file.fileno())
    source.replace(path)
    sync_folder(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name, flush it to disk, then move it into place."""
    with draft_file(path) as draft, draft.open("xb") as file:
        file.write(data)


def append_row(path: Path, row: str) -> None:
    """Append a row to a text file by a single write: several processes may do so at once.

    What a full disk has left of an earlier row stays a line of its own.
    """
    with path.open("ab+", buffering=0) as file:
        torn = file.tell() > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
        data = b"\n" * torn + row.encode() + b"\n"
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename survives a power cut; not all systems can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in CANNOT:
            raise
    finally:
        os.close(handle)


def try_draft(draft: Path) -> None:
    """Do once what saving will do: fill a draft folder, flush it, rename it. Then remove it.

    Not every place can: some network folders have no rename of folders.
    """
    draft.mkdir(parents=True)
    try:
        write_file(draft / "probe", b"steplab")
        draft = draft.rename(draft.with_name(f"{draft.name}_renamed"))
        sync_folder(draft.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def is_alive(process: int) -> bool:
    """Whether a process of this machine lives, by its number: drafts of dead ones are removed."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it runs as another user
    return True


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
            f"Cannot write to {shorten(folder)}: {problem}.",
            f"Choose another place with {remedy}." if remedy else "Choose another path.",
        ) from error

"""Files that a user asked us to write: regular files and new names, nothing else.

A finished file is renamed over its target, which would put a file in the place of a device or a
pipe. So the target is looked at first: when the flag is read, and again before the rename.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from steplab.core.atomic import disk_errors, draft_file, draft_name
from steplab.core.errors import UserError
from steplab.core.input_file import kind_name, shorten


def output_file(path: Path, flag: str = "--out") -> Path:
    """Return the file that `path` leads to: regular or new. Anything else is a UserError.

    A link stays a link, its target is written. `flag` is what named the path; "": none did.
    """
    mode = _mode(path, flag)
    if mode is not None and not stat.S_ISREG(mode):
        raise UserError(
            f"{shorten(path)} is {kind_name(mode)}, and only regular files are written.",
            _another(flag),
        )
    target = path.resolve()
    _try_folder(target.parent, flag)
    return target


def keep_inputs(inputs: Iterable[Path | str], outputs: Iterable[Path], flag: str = "--out") -> None:
    """Raise a UserError if a file to write is one of those to read: it would be replaced."""
    read = {os.path.realpath(path) for path in inputs}
    for path in outputs:
        if os.path.realpath(path) in read:
            raise UserError(f"{shorten(path)} is read, and would be replaced.", _another(flag))


def own_file(path: Path, flag: str) -> Path:
    """Return a file that steplab named itself, in a folder that `flag` named; no link is followed.

    The folder may be a stranger's, such as a checkpoint that is resumed, and a link lead anywhere.
    """
    if path.is_symlink():
        raise UserError(
            f"{shorten(path)} is a symbolic link; steplab writes its own files only.",
            _another(flag),
        )
    return output_file(path, flag)


def output_folder(path: Path, flag: str = "--out") -> Path:
    """Return `path` if it is a folder or a new name; anything else is a UserError."""
    mode = _mode(path, flag)
    if mode is not None and not stat.S_ISDIR(mode):
        kind = "a file" if stat.S_ISREG(mode) else kind_name(mode)
        raise UserError(f"{shorten(path)} is {kind}, not a folder.", _another(flag))
    if mode is None:
        _try_folder(path, flag)
    return path


@contextlib.contextmanager
def output_draft(path: Path, flag: str = "--out") -> Iterator[Path]:
    """Yield a name to write to, which becomes `path` when it is complete; `flag` named the path.

    The folders above it are created.
    """
    target = output_file(path, flag)
    with disk_errors(target.parent, flag):
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft_file(target) as draft:
            yield draft


def write_output(path: Path, data: bytes, flag: str = "--out") -> None:
    """Write a file that a user asked for, complete or not at all; `flag` named the path."""
    with output_draft(path, flag) as draft:
        draft.write_bytes(data)


def _mode(path: Path, flag: str) -> int | None:
    """Return what is at the end of all links; None where there is nothing yet."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None
    except ValueError:  # a NUL in the name
        raise UserError(f"{shorten(path)} is not a file name.", _another(flag)) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"Cannot write {shorten(path)}: {reason}.", _another(flag)) from None


def _try_folder(folder: Path, flag: str) -> None:
    """Refuse a folder in which no file can be created, by creating one: permissions do not tell.

    A new folder is tried in the nearest one that is there.
    """
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    draft = draft_name(there / "steplab")
    with disk_errors(folder, flag):
        draft.touch(exist_ok=False)
        draft.unlink()


def _another(flag: str) -> str:
    return f"Choose another place with {flag}." if flag else "Choose another path."

"""Files that somebody gave us: what may be opened, how much of it is read, how deep it may nest.

Nothing read here is trusted. Only regular files are opened, so that a pipe cannot make a command
wait forever; sizes are checked before memory is taken; and every refusal is one sentence.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

from steplab.core.errors import UserError
from steplab.core.units import bytes_

JSON_GROWTH = 24  # bytes of Python objects for one of JSON: "[]," is 3, and a list 72
DEEPEST = 100  # levels of JSON or TOML; our own records have 8, and Python's stack ends near 1,000
LARGEST_INDEX = 16 << 20  # bytes of a zip's list: 140,000 files of a pack, 250 MB when parsed
ASSUMED_MEMORY = 4 << 30  # bytes, where the system does not say how much there is

FOLDER = "a folder"
_KINDS = (
    (stat.S_ISDIR, FOLDER),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_limit: int | None = None


def memory_limit() -> int:
    """Return how many bytes reading one file may take: `--max-memory`, or a quarter of all."""
    if _limit is not None:
        return _limit
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    except (ValueError, OSError, AttributeError):
        return ASSUMED_MEMORY // 4


def set_memory_limit(limit: int | None) -> None:
    """Set the limit in bytes for this process; None: back to a quarter of the machine's memory."""
    global _limit
    _limit = limit


def check_memory(needed: int, name: object) -> None:
    """Refuse what would take more than the limit; call it before the memory is allocated."""
    limit = memory_limit()
    if needed > limit:
        raise UserError(
            f"{name} needs {bytes_(needed)} of memory, and the limit is {bytes_(limit)}.",
            f"Allow more with --max-memory {-(-needed // 2**30)}GiB if you trust it.",
        )


def check_json_size(size: int, name: object) -> None:
    """Refuse a JSON text of `size` bytes that could take more than the limit once it is parsed."""
    check_memory(size * JSON_GROWTH, name)


def file_kind(path: Path) -> str:
    """Return "" for a regular file, else what it is: "a folder", "a pipe", "a device", ...

    A name that leads nowhere raises a UserError that says why: missing, too long, a loop of links.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise cannot_open(path, error) from None
    return "" if stat.S_ISREG(mode) else kind_name(mode)


def is_missing(path: Path) -> bool:
    """Whether there is nothing of that name; a broken link or a name that is too long is not."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        pass
    return False


def is_folder(path: Path) -> bool:
    """Whether a path is a folder; False: a regular file. Anything else is a UserError."""
    kind = file_kind(path)
    if kind not in ("", FOLDER):
        raise UserError(f"{shorten(path)} is {kind}.", "Give a regular file or a folder.")
    return kind == FOLDER


def kind_name(mode: int) -> str:
    """Return what a file that is not a regular one is called, by its mode."""
    return next((kind for test, kind in _KINDS if test(mode)), "not a regular file")


def open_input(path: Path) -> BinaryIO:
    """Open a regular file for reading; anything else is a UserError in one sentence."""
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to never returns.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        raise cannot_open(path, error) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise UserError(f"{shorten(path)} is {kind_name(mode)}.", "Give a regular file.")
    return open(handle, "rb")


class BoundedZip:
    """An open zip archive for zipfile, which reads the whole list of its files at once."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name = file, name
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        """Read; more than a list of files may have is refused."""
        most = LARGEST_INDEX + 1
        data = self.file.read(most if size < 0 else min(size, most))
        if len(data) == most:
            raise UserError(
                f"{self.name} has too many files: their list is larger than "
                f"{bytes_(LARGEST_INDEX)}."
            )
        return data


def read_input(path: Path, largest: int | None = None) -> bytes:
    """Return the content of a regular file: at most `largest` bytes, or what memory allows."""
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        if largest is not None and size > largest:
            raise UserError(
                f"{shorten(path)} has {bytes_(size)}; files of its kind have {bytes_(largest)} "
                "at most."
            )
        check_memory(size, shorten(path))
        try:
            return file.read(size + 1)  # a file that grows meanwhile is cut
        except OSError as error:
            raise cannot_open(path, error) from None


def parse_json(text: str | bytes, name: object) -> Any:
    """Parse JSON that may be damaged or hostile; `name` is what messages call it."""
    check_json_size(len(text), name)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{name} is not JSON ({error.msg}, line {error.lineno}).") from None
    except UnicodeDecodeError:
        raise UserError(f"{name} is not JSON (it is not UTF-8 text).") from None
    except ValueError as error:  # a number of more than 4,300 digits
        raise UserError(f"{name} is not JSON that can be read ({error}).") from None
    except RecursionError:
        raise _too_deep(name) from None
    check_data(data, name)
    return data


def parse_toml(text: str | bytes, name: object) -> dict[str, Any]:
    """Parse TOML that may be damaged or hostile; `name` is what messages call it."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError:
        raise UserError(f"{name} is not TOML (it is not UTF-8 text).") from None
    # tomllib takes 400 MB and 1.3 s for one key of 10,000 dots, and 100 times that for 100,000.
    if any(line.count(".") > DEEPEST for line in text.splitlines()):
        raise _too_deep(name)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name} is not TOML ({error}).") from None
    except ValueError as error:
        raise UserError(f"{name} is not TOML that can be read ({error}).") from None
    except RecursionError:
        raise _too_deep(name) from None
    check_data(data, name)
    return data


def check_data(data: Any, name: object) -> None:
    """Refuse what no record of ours has: deep nests, before something recurses into them, and
    whole numbers of more than 64 bits, which no array and no clock can hold.
    """
    level = [data]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for item in level:
            if type(item) is float or type(item) is str:  # most are
                continue
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            elif isinstance(item, int) and item.bit_length() > 64:
                raise UserError(f"{name} has a number of {item.bit_length():,} bits; 64 are read.")
        if not inner:
            return
        level = inner
    raise _too_deep(name)


def cannot_open(path: Path, error: Exception) -> UserError:
    """Return the sentence for a name that cannot be opened, by the system's own reason."""
    number = getattr(error, "errno", None)
    name = shorten(path)
    if number in (errno.ENOENT, errno.ENOTDIR):
        return UserError(f"There is no file {name}.")
    if number == errno.ENAMETOOLONG:
        return UserError(f"{name} is longer than a file name may be ({len(str(path)):,} letters).")
    if number == errno.ELOOP:
        return UserError(f"{name} is a symbolic link that leads back to itself.")
    if number == errno.ENXIO:
        return UserError(
            f"{name} is a socket or a pipe that nobody serves.", "Give a regular file."
        )
    if number in (errno.EACCES, errno.EPERM):
        return UserError(f"{name} cannot be read: no permission.")
    reason = getattr(error, "strerror", None) or str(error)
    return UserError(f"{name} cannot be read ({reason}).")


def shorten(path: object, longest: int = 200) -> str:
    """Return a name for a message: at most `longest` letters, nothing that steers a terminal."""
    text, half = str(path), longest // 2
    if len(text) > longest:
        text = f"{text[:half]}...{text[-half:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _too_deep(name: object) -> UserError:
    return UserError(f"{name} nests deeper than {DEEPEST} levels; nothing of steplab's does.")

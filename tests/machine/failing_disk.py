"""A disk that fails in the middle: the calls that change it are counted, and one of them fails."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator

import pytest

# Taken away from a full disk, names and empty files still go: those calls never fail here.
CALLS = ("fsync", "rename", "replace", "mkdir", "link")
WRITING = set("wax+")


class FailingDisk:
    """Lets the call number `at` fail, and with `stays` all after it; 0 only counts.

    A call is one of CALLS, the opening of a file for writing, or the first write to it.
    """

    def __init__(self, at: int, code: int = errno.ENOSPC, stays: bool = False) -> None:
        self.at, self.code, self.stays = at, code, stays
        self.seen: list[str] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Count and fail from here on, in this process."""
        for name in CALLS:
            patch.setattr(os, name, self._counted(getattr(os, name), name))
        opened = self._opening(io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)

    def count(self, name: str) -> None:
        """Count a call; fail where it is its turn."""
        self.seen.append(name)
        turn = len(self.seen)
        if self.at and (turn == self.at or (self.stays and turn > self.at)):
            raise OSError(self.code, os.strerror(self.code))

    def _counted(self, call: Callable, name: str) -> Callable:
        def counted(*args, **kwargs):
            self.count(name)
            return call(*args, **kwargs)

        return counted

    def _opening(self, call: Callable) -> Callable:
        def opening(file, mode="r", *args, **kwargs):
            if isinstance(file, int) or not WRITING & set(mode):
                return call(file, mode, *args, **kwargs)
            self.count(f"open {os.path.basename(file)}")
            opened = call(file, mode, *args, **kwargs)
            write = opened.write

            def first_write(data):
                opened.write = write
                self.count(f"write {os.path.basename(file)}")
                return write(data)

            opened.write = first_write
            return opened

        return opening


def every_failure(
    action: Callable[[], object], code: int = errno.ENOSPC, stays: bool = False
) -> Iterator[FailingDisk]:
    """Do `action` again and again, with another call failing each time, until none fails.

    Yields the disk after each time, with nothing failing any more.
    """
    at = 1
    while True:
        disk = FailingDisk(at, code, stays)
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            action()
        yield disk
        if len(disk.seen) < at:
            return
        at += 1

"""A training script that is only watched leaves no files behind and changes none.

What it opens for writing is a file in a scratch folder in the place of its own, which it may read
again; `torch.save` and safetensors save nothing; folders that it makes are removed if they stay
empty. What was there before is neither removed nor renamed: a script that clears its output folder
first only believes that it did. What other programs or libraries write past Python's `open` is
theirs.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from steplab.core.errors import UserError

CLOCK = 0.02  # seconds by which the clock of a file system may lag behind
SAVERS = ("save_file", "save_model")  # of safetensors.torch
QUIET = {"WANDB_MODE": "disabled", "MLFLOW_TRACKING_URI": "", "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Let nothing that Python code writes inside reach the user's files."""
    with tempfile.TemporaryDirectory(prefix="steplab-script-") as scratch, _Folder(scratch).here():
        yield


class _Folder:
    """The scratch folder: by the path that the script has asked for, the file it got."""

    def __init__(self, scratch: str) -> None:
        self.scratch = scratch
        self.open = builtins.open  # as it is outside
        self.twins: dict[str, str] = {}
        self.made: list[str] = []
        self.removed: set[str] = set()  # what the script believes to be gone
        self.began = time.time() - CLOCK

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Stand in for `open` and the like."""
        with contextlib.ExitStack() as patches:
            opened = self._opener(self.open)
            patches.enter_context(patch.object(builtins, "open", opened))
            patches.enter_context(patch.object(io, "open", opened))
            for name in ("replace", "rename"):
                mover = self._mover(getattr(os, name))
                patches.enter_context(patch.object(os, name, mover))
            for name in ("remove", "unlink", "rmdir"):
                remover = self._remover(getattr(os, name))
                patches.enter_context(patch.object(os, name, remover))
            patches.enter_context(patch.object(os, "mkdir", self._maker(os.mkdir)))
            patches.enter_context(patch.object(torch, "save", _save_nothing))
            if "safetensors" in sys.modules:
                import safetensors.torch

                for name in SAVERS:
                    patches.enter_context(patch.object(safetensors.torch, name, _save_nothing))
            patches.enter_context(patch.dict(os.environ, QUIET))
            try:
                yield
            finally:
                for folder in reversed(self.made):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)

    def _opener(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not isinstance(file, (str, bytes, os.PathLike)):
                return original(file, mode, *arguments, **options)
            path = os.path.abspath(os.fsdecode(file))
            if set(mode) & set("wax+") and not path.startswith(("/dev/", "/proc/")):
                is_kept = not set(mode) & set("wx") and path not in self.removed
                self._twin(path, keep=is_kept)
            return original(self.twins.get(path, file), mode, *arguments, **options)

        return opened

    def _twin(self, path: str, keep: bool) -> None:
        """Give a path its file in the scratch folder, with what it holds where that is kept."""
        if path in self.twins:
            return
        twin = str(Path(self.scratch) / f"{len(self.twins)}-{os.path.basename(path)}")
        if keep and os.path.isfile(path):
            with self.open(path, "rb") as source, self.open(twin, "wb") as target:
                shutil.copyfileobj(source, target)
        self.twins[path] = twin

    def _mover(self, original: Callable[..., None]) -> Callable[..., None]:
        def move(source: Any, target: Any, **options: Any) -> None:
            path, goal = (os.path.abspath(os.fsdecode(word)) for word in (source, target))
            if path not in self.twins and (self._is_new(path) or not os.path.lexists(path)):
                original(source, target, **options)
                return
            if os.path.isdir(path):
                raise UserError(
                    f"The script renames the folder {path}, which was there before.",
                    "Give it words with which it leaves that folder alone.",
                )
            if path not in self.twins:
                self._twin(path, keep=True)
                self.removed.add(path)
            self.twins[goal] = self.twins.pop(path)

        return move

    def _remover(self, original: Callable[..., None]) -> Callable[..., None]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            folder = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            found = os.path.abspath(os.path.join(folder, os.fsdecode(path)))
            if self.twins.pop(found, None) is not None:
                return
            if self._is_new(found) or not os.path.lexists(found):
                original(path, dir_fd=dir_fd)
            else:
                self.removed.add(found)

        return remove

    def _is_new(self, path: str) -> bool:
        """Whether something has come to be since the script began, so that it may go again."""
        try:
            status = os.lstat(path)
        except OSError:
            return False
        is_folder = stat.S_ISDIR(status.st_mode)  # whose time changes with what is in it
        return path in self.made or (not is_folder and status.st_ctime >= self.began)

    def _maker(self, original: Callable[..., None]) -> Callable[..., None]:
        def make(path: Any, *arguments: Any, **options: Any) -> None:
            found = os.path.abspath(os.fsdecode(path))
            if found in self.removed:  # it is still there
                self.removed.discard(found)
                return
            original(path, *arguments, **options)
            self.made.append(found)

        return make


def _save_nothing(*arguments: Any, **options: Any) -> None:
    """Stand in for a function that saves."""

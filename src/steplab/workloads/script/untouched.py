"""A training script that is only watched leaves no files behind and changes none.

What it opens for writing is a file in a scratch folder in the place of its own, which it may read
again; `torch.save` and safetensors save nothing; folders that it makes are removed if they stay
empty. What other programs or libraries write past Python's `open` is theirs.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

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
                self._twin(path, keep=not set(mode) & set("wx"))
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
            path = os.path.abspath(os.fsdecode(source))
            if path in self.twins:
                self.twins[os.path.abspath(os.fsdecode(target))] = self.twins.pop(path)
            else:
                original(source, target, **options)

        return move

    def _maker(self, original: Callable[..., None]) -> Callable[..., None]:
        def make(path: Any, *arguments: Any, **options: Any) -> None:
            original(path, *arguments, **options)
            self.made.append(os.path.abspath(os.fsdecode(path)))

        return make


def _save_nothing(*arguments: Any, **options: Any) -> None:
    """Stand in for a function that saves."""

"""A folder of checkpoints: listing, finding, naming, pruning and locking.

Layout: `<folder>/step-00000080/{checkpoint.json, *.safetensors}`. A second save of one step goes
beside the first as `step-00000080.1` and counts as newer, so that nothing is ever overwritten.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from steplab.core.errors import UserError
from steplab.store.atomic import disk_errors

CHECKPOINT_FILE = "checkpoint.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RNG_FILE = "rng.safetensors"
LOCK_FILE = ".lock"
NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
DRAFT = re.compile(r"\.draft-(\d+)-\w+")
PICKLE_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}
# The first bytes of a pickle (protocol 2 and later) and of the zip file that torch.save writes.
PICKLE_STARTS = (b"\x80", b"PK\x03\x04")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest (fewest steps) first; drafts are not listed."""
    with _read_errors(folder):
        if not folder.is_dir():
            return []
        found = [p for p in folder.iterdir() if NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=_order)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the most steps, or None when there is none.

    A damaged one is not skipped: going back to an older one is the user's decision.
    """
    found = list_checkpoints(folder)
    return found[-1] if found else None


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `path` names: itself, or the newest one in that folder."""
    with _read_errors(path):
        if path.is_file():
            raise _not_a_folder(path)
        if not path.is_dir():
            last = newest_checkpoint(path.parent)
            hint = f"The newest in {path.parent} is {last.name}." if last else ""
            raise UserError(f"There is no checkpoint {path}.", hint)
        if NAME.fullmatch(path.name) or (path / CHECKPOINT_FILE).is_file():
            return path
    last = newest_checkpoint(path)
    if last is None:
        raise UserError(f"There is no checkpoint in {path}.", "Its name would be step-00000080.")
    return last


def new_draft(folder: Path) -> Path:
    """Create a hidden folder named after its writer, so that others see when that is dead."""
    draft = _draft_name(folder)
    draft.mkdir()
    return draft


def next_checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path for a checkpoint of `step` that sorts after those already there."""
    taken = [order for order in map(_order, list_checkpoints(folder)) if order[0] == step]
    again = f".{taken[-1][1] + 1}" if taken else ""
    return folder / f"step-{step:08d}{again}"


def remove_stale_drafts(folder: Path) -> None:
    """Remove the drafts of dead processes, and those that this process left behind."""
    for path in folder.iterdir():
        match = DRAFT.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not _is_alive(int(match[1]))):
            shutil.rmtree(path, ignore_errors=True)


def prune_checkpoints(folder: Path, written: Path, keep: int) -> None:
    """Remove the oldest checkpoints until `keep` are left (0 keeps all); `written` always stays."""
    others = [
        p for p in list_checkpoints(folder) if p != written and (p / CHECKPOINT_FILE).is_file()
    ]
    surplus = len(others) + 1 - keep if keep else 0
    for old in others[: max(0, surplus)]:
        # Renamed first: it vanishes from listings as a whole, whenever the process dies.
        doomed = old.rename(_draft_name(folder))
        shutil.rmtree(doomed, ignore_errors=True)


@contextlib.contextmanager
def lock_checkpoint_folder(folder: Path) -> Iterator[None]:
    """Hold the folder for one run: two would remove each other's checkpoints.

    The system releases the lock when the process ends. Windows has no such locks: nothing is held.
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


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None


def _order(path: Path) -> tuple[int, int]:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _draft_name(folder: Path) -> Path:
    return folder / f".draft-{os.getpid()}-{secrets.token_hex(4)}"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it runs as another user
    return True


def _not_a_folder(path: Path) -> UserError:
    """Explain why a file is no checkpoint; it is read but never unpickled."""
    with path.open("rb") as file:
        start = file.read(4)
    if path.suffix in PICKLE_SUFFIXES or start.startswith(PICKLE_STARTS):
        return UserError(
            f"{path} is a pickle, which can run any code while it is read, so it is refused.",
            "Give a checkpoint folder that steplab wrote.",
        )
    hint = f"Use {path.parent}." if (path.parent / CHECKPOINT_FILE).is_file() else ""
    return UserError(f"{path} is a file, but a checkpoint is a folder.", hint)

"""A checkpoint on disk: its folder, its checkpoint.json, whether its files are intact. No torch.

Layout: `<folder>/step-00000080/{checkpoint.json, *.safetensors}`; of several ranks
`{checkpoint.json, rng.safetensors, model/rank-00000.safetensors, optimizer/..., ...}`. A second
save of one step goes beside the first as `step-00000080.1` and counts as newer, so that nothing is
ever overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from steplab.core.atomic import CANNOT, disk_errors, is_alive, sync_folder, try_draft, write_file
from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.core.input_file import (
    file_kind,
    is_folder,
    is_missing,
    open_input,
    parse_json,
    read_input,
    shorten,
)
from steplab.core.output_file import own_file
from steplab.core.upgrade import VERSION, check_version, upgrade

CHECKPOINT_FILE = "checkpoint.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RNG_FILE = "rng.safetensors"
# Several ranks write slices of model and optimizer into folders of these names.
MODEL, OPTIMIZER = "model", "optimizer"
SLICE_FILE = re.compile(r"(model|optimizer)/rank-\d{5,}\.safetensors")
LOCK_FILE = ".lock"
NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
DRAFT = re.compile(r"\.draft-(\d+)-\w+")
PICKLE_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}
# The first bytes of a pickle (protocol 2 and later) and of the zip file that torch.save writes.
PICKLE_STARTS = (b"\x80", b"PK\x03\x04")
CHUNK = 16 * 2**20  # bytes read at a time


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
    if is_missing(path):
        last = newest_checkpoint(path.parent)
        hint = f"The newest in {path.parent} is {last.name}." if last else ""
        raise UserError(f"There is no checkpoint {shorten(path)}.", hint)
    with _read_errors(path):
        if not is_folder(path):
            raise _not_a_folder(path)
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


def open_draft(folder: Path) -> Path:
    """Return a new draft in `folder`, which is made and cleared of what dead processes left."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
    remove_stale_drafts(folder)
    return new_draft(folder)


def publish_draft(draft: Path, manifest: Manifest, keep: int) -> Path:
    """Complete a draft whose tensor files are flushed, and rename it: now it is a checkpoint.

    Then all but the `keep` newest are removed (0 keeps all).
    """
    folder = draft.parent
    write_file(draft / CHECKPOINT_FILE, manifest_to_json(manifest))
    final = draft.rename(next_checkpoint_path(folder, manifest.progress.step))
    sync_folder(folder)
    prune_checkpoints(folder, final, keep)
    return final


def next_checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path for a checkpoint of `step` that sorts after those already there."""
    taken = [order for order in map(_order, list_checkpoints(folder)) if order[0] == step]
    again = f".{taken[-1][1] + 1}" if taken else ""
    return folder / f"step-{step:08d}{again}"


def remove_stale_drafts(folder: Path) -> None:
    """Remove the drafts of dead processes, and those that this process left behind."""
    for path in folder.iterdir():
        match = DRAFT.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not is_alive(int(match[1]))):
            shutil.rmtree(path, ignore_errors=True)


def prune_checkpoints(folder: Path, written: Path, keep: int) -> None:
    """Remove the oldest checkpoints until `keep` are left (0 keeps all); `written` always stays."""
    others = [
        p for p in list_checkpoints(folder) if p != written and (p / CHECKPOINT_FILE).is_file()
    ]
    surplus = len(others) + 1 - keep if keep else 0
    for old in others[: max(0, surplus)]:
        # Renamed first: it vanishes from listings as a whole, whenever the process dies. One that
        # cannot be renamed (somebody reads it over a network) stays until the next save.
        with contextlib.suppress(OSError):
            doomed = old.rename(_draft_name(folder))
            shutil.rmtree(doomed, ignore_errors=True)


@contextlib.contextmanager
def lock_checkpoint_folder(folder: Path) -> Iterator[None]:
    """Hold the folder for one run: two would remove each other's checkpoints.

    The system releases the lock when the process ends. Windows and some network folders have no
    such locks: there nothing is held. That checkpoints can be written is tried out at once, not
    after an hour of training.
    """
    lock = own_file(folder / LOCK_FILE, "--checkpoint-dir")
    with disk_errors(folder, "--checkpoint-dir"):
        folder.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    with file:
        _lock(file, folder)
        with disk_errors(folder, "--checkpoint-dir"):
            try_draft(_draft_name(folder))
        yield


def _lock(file: IO[str], folder: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"Another run is writing to {folder}.", "Give this one another --checkpoint-dir."
        ) from None
    except OSError as error:
        if error.errno not in (*CANNOT, errno.ENOLCK):
            raise UserError(f"{folder} cannot be locked ({error.strerror}).") from None


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{shorten(path)} cannot be read ({error.strerror}).") from None


def _order(path: Path) -> tuple[int, int]:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _draft_name(folder: Path) -> Path:
    return folder / f".draft-{os.getpid()}-{secrets.token_hex(4)}"


def _not_a_folder(path: Path) -> UserError:
    """Explain why a file is no checkpoint; it is read but never unpickled."""
    with open_input(path) as file:
        start = file.read(4)
    if path.suffix in PICKLE_SUFFIXES or start.startswith(PICKLE_STARTS):
        return UserError(
            f"{path} is a pickle, which can run any code while it is read, so it is refused.",
            "Give a checkpoint folder that steplab wrote.",
        )
    hint = f"Use {path.parent}." if (path.parent / CHECKPOINT_FILE).is_file() else ""
    return UserError(f"{path} is a file, but a checkpoint is a folder.", hint)


@dataclass(frozen=True)
class TrainProgress:
    """How far a training is: the part of the manifest that the training loop owns.

    `position` and `spec` are plain JSON data: string keys, lists instead of tuples.
    """

    step: int  # optimizer steps done
    position: Mapping[str, Any]  # where the data continues; only its reader understands it
    spec: Mapping[str, Any]  # what is being trained, and how
    metrics: Mapping[str, float] = field(default_factory=dict)  # the last losses and rates
    steplab: str = ""  # version; like the next two, filled in by `save_checkpoint`
    torch: str = ""  # version
    created: str = ""  # UTC, ISO 8601


@dataclass(frozen=True)
class FileChecksum:
    """What a file must have to be intact."""

    size: int  # bytes
    crc32: int


@dataclass(frozen=True)
class ParamGroup:
    """One parameter group of an optimizer: names, and settings such as lr and betas."""

    parameters: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer without its tensors."""

    kind: str  # name of its class
    groups: tuple[ParamGroup, ...]
    values: Mapping[str, Mapping[str, Any]]  # parameter -> key -> state that is not a tensor
    stateless: tuple[str, ...] = ()  # parameters that no step has updated so far


@dataclass(frozen=True)
class PythonRngState:
    """State of the generator behind the module `random`."""

    version: int
    words: tuple[int, ...]
    gauss: float | None


@dataclass(frozen=True)
class NumpyRngState:
    """State of numpy's global Mersenne Twister."""

    key: tuple[int, ...]
    position: int
    has_gauss: int
    gauss: float


@dataclass(frozen=True)
class Manifest:
    """The content of checkpoint.json."""

    progress: TrainProgress
    optimizer: OptimizerRecord
    scaler: Mapping[str, int | float]  # empty when gradients are not scaled
    python_random: PythonRngState
    numpy_random: NumpyRngState
    files: Mapping[str, FileChecksum]  # by name of the tensor file, as in "model.safetensors"

    def files_of(self, kind: str) -> list[str]:
        """Return the files of MODEL or of OPTIMIZER: one of whole tensors, or slices of ranks."""
        whole = f"{kind}.safetensors"
        slices = sorted(name for name in self.files if name.startswith(f"{kind}/"))
        return [whole] if whole in self.files else slices


def manifest_to_json(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, with its version and a checksum of its content."""
    content = encode(manifest)
    head = {"steplab_checkpoint": VERSION, "crc32": _checksum(content)}
    return json.dumps({**head, "content": content}, allow_nan=False).encode()


def manifest_from_json(text: bytes, where: str) -> Manifest:
    """Read a manifest; one that is foreign, damaged or newer is a UserError."""
    data = parse_json(text, where)
    version = data.get("steplab_checkpoint") if isinstance(data, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UserError(f"{where} does not belong to a steplab checkpoint.")
    check_version(version, where)
    if data.get("crc32") != _checksum(data.get("content")):
        raise UserError(f"{where} is damaged: its content does not match its checksum.")
    manifest: Manifest = decode(Manifest, upgrade("checkpoint", version, data["content"]), where)
    if manifest.progress.step < 0:
        raise UserError(f"{where} is damaged: no training has done {manifest.progress.step} steps.")
    return manifest


def _checksum(content: Any) -> int:
    """Return a checksum of the data itself: indentation and the order of keys do not matter."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read_manifest(path: Path) -> Manifest:
    """Return what checkpoint.json says; the tensor files are not checked."""
    return _suggest_a_good_one(_read, path)


def read_verified_manifest(path: Path, rank: int = 0, ranks: int = 1) -> Manifest:
    """Return the manifest once size and checksum of every tensor file have been verified.

    Ranks that read a checkpoint together share the files out: each verifies every `ranks`-th.
    """
    return _suggest_a_good_one(lambda path: _read_and_verify(path, rank, ranks), path)


def _suggest_a_good_one(read: Callable[[Path], Manifest], path: Path) -> Manifest:
    """Read; the error about a damaged checkpoint names the last good one before it, if any."""
    try:
        return read(path)
    except UserError as damage:
        if damage.suggestion:
            raise
        good = _last_good_before(path)
        raise UserError(damage.message, f"Resume from {good} instead." if good else "") from None


def _read(path: Path) -> Manifest:
    file = path / CHECKPOINT_FILE
    if is_missing(file):
        raise UserError(f"{path} is not a complete checkpoint: it has no {file.name}.")
    manifest = manifest_from_json(read_input(file), str(file))
    for name in manifest.files:
        # Nothing outside of the checkpoint is opened, whatever its document says.
        if name not in (MODEL_FILE, OPTIMIZER_FILE, RNG_FILE) and not SLICE_FILE.fullmatch(name):
            raise UserError(f"{file} is damaged: it mentions {shorten(name)}.")
    return manifest


def bytes_of_weights(path: Path) -> int:
    """Return the size of the weights of the checkpoint `path`."""
    return sum(_size(path / name) for name in _read(path).files_of(MODEL))


def _size(path: Path) -> int:
    if is_missing(path):
        raise UserError(f"{path} is missing.")
    if kind := file_kind(path):
        raise UserError(f"{path} is {kind}, not a file of tensors.")
    return path.stat().st_size


def _read_and_verify(path: Path, rank: int = 0, ranks: int = 1) -> Manifest:
    manifest = _read(path)
    needed = {
        MODEL_FILE: manifest.files_of(MODEL),
        OPTIMIZER_FILE: manifest.files_of(OPTIMIZER),
        RNG_FILE: [name for name in manifest.files if name == RNG_FILE],
    }
    for name, files in needed.items():
        if not files:
            raise UserError(f"{path / CHECKPOINT_FILE} is damaged: it does not mention {name}.")
    for name in sorted(manifest.files)[rank::ranks]:
        _check_file(path / name, manifest.files[name])
    return manifest


def _check_file(path: Path, expected: FileChecksum) -> None:
    size = _size(path)
    if size != expected.size:
        raise UserError(f"{path} is damaged: it has {size} bytes instead of {expected.size}.")
    with _read_errors(path):
        crc32 = _crc32(path)
    if crc32 != expected.crc32:
        raise UserError(f"{path} is damaged: its content does not match its checksum.")


def _crc32(path: Path) -> int:
    crc32 = 0
    with open_input(path) as file:
        while chunk := file.read(CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _last_good_before(path: Path) -> Path | None:
    siblings = list_checkpoints(path.parent)
    for older in reversed(siblings[: siblings.index(path)] if path in siblings else siblings):
        try:
            _read_and_verify(older)
        except UserError:
            continue
        return older
    return None

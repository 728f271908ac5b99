"""Runs in one file, to carry them from the machine with the GPU to a laptop.

A pack holds data alone: Runs, traces and texts. A Run's page stays behind, because a browser would
run what is in it; `steplab explain RUN --page FILE` draws it anew.

Packs come from strangers too. Nothing of one is in the store before all of it has been read and
checked, it is unpacked to disk and not to memory, and what it unpacks to is counted as it comes,
whatever its headers say.
"""

from __future__ import annotations

import contextlib
import lzma
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from steplab.core import Run, run_from_json
from steplab.core.atomic import disk_errors
from steplab.core.errors import UserError
from steplab.core.input_file import BoundedZip, check_json_size, open_input, shorten
from steplab.core.output_file import output_draft
from steplab.core.units import bytes_
from steplab.store.store import RUN_FILE, Store, is_plain_name

LARGEST_UNPACKED = 4 << 30  # bytes; a pack of a few hundred Runs is some MB
CHUNK = 1 << 20  # bytes unpacked at a time
DATA_SUFFIXES = (".json", ".json.gz", ".txt")
PAGE_SUFFIX = ".html"

# What zipfile raises about an archive that is damaged, encrypted or packed in an unknown way.
DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    OSError,
)


def pack_runs(store: Store, ids: Sequence[str], target: Path) -> int:
    """Write the named Runs with their data files into one zip file; return how many."""
    if target.exists():
        raise UserError(
            f"{shorten(target)} already exists.", "Choose another name or remove it first."
        )
    files = [(run_id, path) for run_id in ids for path in _files(store.runs / run_id)]
    size = sum(path.stat().st_size for _, path in files)
    if size > LARGEST_UNPACKED:
        raise UserError(
            f"These Runs are {bytes_(size)}, and a pack holds {bytes_(LARGEST_UNPACKED)}.",
            "Name fewer of them.",
        )
    with (
        output_draft(target, "--pack") as draft,
        zipfile.ZipFile(draft, "x", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive,
    ):
        for run_id, path in files:
            archive.write(path, f"{run_id}/{path.name}")
    return len(ids)


def unpack_runs(store: Store, source: Path) -> tuple[int, int]:
    """Add the Runs of a pack to the store, all or none; return (added, already there)."""
    name = shorten(source)
    with open_input(source) as file, _open(file, name) as archive:
        entries = _entries(archive, name)
        if not entries:
            raise UserError(f"{name} holds no Runs.", "Pack some: steplab runs --pack FILE.")
        if sum(info.file_size for info in archive.infolist()) > LARGEST_UNPACKED:
            raise _too_large(name)
        present = set(store.ids())
        runs = {
            run_id: _read_run(archive, run_id, files[RUN_FILE], name)
            for run_id, files in entries.items()
        }
        new = [run for run_id, run in runs.items() if run_id not in present]
        if new:
            _add(store, archive, entries, new, name)
    return len(new), len(runs) - len(new)


def _files(folder: Path) -> list[Path]:
    """Return the data files of a Run; a link could bring in any file of this machine."""
    found = sorted(path for path in folder.iterdir() if path.name.endswith(DATA_SUFFIXES))
    for path in found:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise UserError(
                f"{shorten(path)} is not a regular file, so its Run cannot be packed.",
                "Remove it, or replace it by a file.",
            )
    return found


def _too_large(name: str) -> UserError:
    return UserError(
        f"{name} unpacks to more than {bytes_(LARGEST_UNPACKED)}.",
        "Ask for the Runs in several packs.",
    )


@contextlib.contextmanager
def _damage(name: str) -> Iterator[None]:
    """Turn whatever is wrong with an archive into one sentence."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, RuntimeError) and "encrypted" in str(error):
            raise UserError(f"{name} is encrypted; a pack of Runs is not.") from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name} is not a pack of Runs, or it is damaged ({reason}).") from None


@contextlib.contextmanager
def _open(file: BinaryIO, name: str) -> Iterator[zipfile.ZipFile]:
    with _damage(name):
        archive = zipfile.ZipFile(BoundedZip(file, name))
    with archive:
        yield archive


def _entries(archive: zipfile.ZipFile, name: str) -> dict[str, dict[str, zipfile.ZipInfo]]:
    """Return the files by Run and by their names; what no Run has, such as code, is refused."""
    found: dict[str, dict[str, zipfile.ZipInfo]] = {}
    for info in archive.infolist():
        parts = info.filename.split("/")
        if len(parts) != 2 or not all(map(is_plain_name, parts)):
            shown = shorten(repr(info.filename))
            raise UserError(f"{name} contains {shown}, which does not belong to a Run.")
        if parts[1].endswith(PAGE_SUFFIX):
            continue
        if not parts[1].endswith(DATA_SUFFIXES):
            raise UserError(
                f"{name} contains {info.filename!r}, and a pack holds no other files than "
                f"{' '.join(DATA_SUFFIXES)}.",
                "Pack the Runs anew: steplab runs --pack FILE.",
            )
        files = found.setdefault(parts[0], {})
        if parts[1] in files:
            raise UserError(f"{name} contains {info.filename} twice.")
        files[parts[1]] = info
    for run_id, files in found.items():
        if RUN_FILE not in files:
            raise UserError(f"{name}: {run_id} has no {RUN_FILE}.")
    return found


def _read_run(archive: zipfile.ZipFile, run_id: str, info: zipfile.ZipInfo, name: str) -> Run:
    where = f"{name}: {run_id}"
    check_json_size(info.file_size, where)
    with _damage(name), archive.open(info) as stream:
        data = stream.read(info.file_size + 1)
    run = run_from_json(data, where)
    if run.id != run_id:
        raise UserError(f"{name}: the folder {run_id} holds the Run {run.id}.")
    return run


def _add(
    store: Store,
    archive: zipfile.ZipFile,
    entries: dict[str, dict[str, zipfile.ZipInfo]],
    runs: Sequence[Run],
    name: str,
) -> None:
    """Unpack beside the Runs of the store, then move one Run after the other among them."""
    store.check_writable()
    stage = store.draft_path("unpack")
    left = LARGEST_UNPACKED
    artifacts: dict[str, dict[str, Path]] = {}
    try:
        for run in runs:
            folder = stage / run.id
            with disk_errors(store.root):
                folder.mkdir(parents=True)
            artifacts[run.id] = {}
            for file_name, info in entries[run.id].items():
                if file_name != RUN_FILE:
                    left -= _unpack_file(archive, info, folder / file_name, left, store, name)
                    artifacts[run.id][file_name] = folder / file_name
        for run in runs:
            store.add(run, artifacts[run.id])
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _unpack_file(
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    target: Path,
    left: int,
    store: Store,
    name: str,
) -> int:
    """Unpack one file and return its size; more than `left` bytes are refused as they come."""
    size = 0
    with _damage(name):
        stream = archive.open(info)
    with stream, disk_errors(store.root), target.open("xb") as file:
        while True:
            with _damage(name):
                chunk = stream.read(CHUNK)
            if not chunk:
                return size
            size += len(chunk)
            if size > left:
                raise _too_large(name)
            file.write(chunk)

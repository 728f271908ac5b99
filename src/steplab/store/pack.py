"""Runs in one file, to carry them from the machine with the GPU to a laptop.

A pack holds data alone: Runs, traces and texts. A Run's page stays behind, because a browser would
run what is in it; `steplab explain RUN --page FILE` draws it anew.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from steplab.core import run_from_json
from steplab.core.errors import UserError
from steplab.store.atomic import disk_errors
from steplab.store.store import RUN_FILE, Store

# A pack of a few hundred Runs is some MB; this bounds what a hostile archive can unpack to.
LARGEST_UNPACKED = 8 * 2**30
DATA_SUFFIXES = (".json", ".json.gz", ".txt")
PAGE_SUFFIX = ".html"


def pack_runs(store: Store, ids: Sequence[str], target: Path) -> int:
    """Write the named Runs with their data files into one zip file; return how many."""
    if target.exists():
        raise UserError(f"{target} already exists.", "Choose another name or remove it first.")
    draft = target.with_name(f".{target.name}.draft")
    with disk_errors(target.parent, "--pack"):
        try:
            with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
                for run_id in ids:
                    for path in sorted((store.runs / run_id).iterdir()):
                        if path.name.endswith(DATA_SUFFIXES):
                            archive.write(path, f"{run_id}/{path.name}")
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    return len(ids)


def unpack_runs(store: Store, source: Path) -> tuple[int, int]:
    """Add the Runs of a pack to the store; return (added, already there).

    Every Run is checked before it is written; a name that would leave the store, or a file that no
    Run has, such as code, is refused.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            return _unpack(store, archive, source)
    except FileNotFoundError:
        raise UserError(f"There is no file {source}.") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{source} is not a pack of Runs, or it is damaged ({error}).") from None


def _unpack(store: Store, archive: zipfile.ZipFile, source: Path) -> tuple[int, int]:
    if sum(info.file_size for info in archive.infolist()) > LARGEST_UNPACKED:
        raise UserError(f"{source} would unpack to more than {LARGEST_UNPACKED // 2**30} GiB.")
    files: dict[str, dict[str, bytes]] = {}
    for info in archive.infolist():
        parts = PurePosixPath(info.filename).parts
        if len(parts) != 2 or any(p.startswith(".") or "\\" in p for p in parts):
            raise UserError(f"{source} contains {info.filename!r}, which does not belong to a Run.")
        if parts[1].endswith(PAGE_SUFFIX):
            continue
        if not parts[1].endswith(DATA_SUFFIXES):
            raise UserError(
                f"{source} contains {info.filename!r}, and a pack holds no other files than "
                f"{' '.join(DATA_SUFFIXES)}.",
                "Pack the Runs anew: steplab runs --pack FILE.",
            )
        files.setdefault(parts[0], {})[parts[1]] = archive.read(info)
    runs = {}
    for run_id, content in files.items():
        if RUN_FILE not in content:
            raise UserError(f"{source}: {run_id} has no {RUN_FILE}.")
        text = content.pop(RUN_FILE).decode("utf-8", errors="replace")
        runs[run_id] = run_from_json(text, f"{source}: {run_id}")
        if runs[run_id].id != run_id:
            raise UserError(f"{source}: the folder {run_id} holds the Run {runs[run_id].id}.")
    present = set(store.ids())
    store.check_writable()
    for run_id, run in runs.items():
        if run_id not in present:
            store.save(run, files[run_id])
    known = sum(run_id in present for run_id in runs)
    return len(runs) - known, known

"""Store: a folder of Runs that several processes may write at once."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import platform
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from steplab.core import Run, run_from_json, run_to_json
from steplab.core.atomic import (
    disk_errors,
    is_alive,
    move_file,
    sync_folder,
    try_draft,
    write_file,
)
from steplab.core.errors import UserError
from steplab.core.input_file import read_input, shorten
from steplab.core.output_file import output_folder
from steplab.core.run import RANDOM_DIGITS

DEFAULT_ROOT = Path("steplab-runs")
RUN_FILE = "run.json"
LAST_FILE = "last"  # holds the id of the Run that was saved last, whatever the clock said
NEAREST = 3  # ids that are suggested where one is not found
# A draft this old belongs to a process that was killed: no write takes a day. Clocks jump, so on
# its own machine the process must be dead as well.
STALE_SECONDS = 24 * 3600
DRAFT = re.compile(r"\.draft-(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-.*")
LONGEST_NAME = 200  # letters of a file's name; systems stop at 255 bytes


def is_plain_name(name: str) -> bool:
    """Whether `name` can be that of a Run or an artifact: a file of its own folder, not hidden."""
    return (
        0 < len(name) <= LONGEST_NAME
        and name.isprintable()
        and not name.startswith(".")
        and not any(c in name for c in "/\\")
    )


# Where the Runs that this process has written or read are: a Run does not know its own folder.
_ROOTS: dict[str, Path] = {}


def store_of(run: Run) -> Store:
    """Return the store that a Run was saved in or loaded from by this process, else the default."""
    return Store(_ROOTS.get(run.id, DEFAULT_ROOT))


class Store:
    """Runs in `<root>/runs/<run id>/`: run.json with the Run's artifacts beside it.

    A Run is written into a hidden draft folder and renamed, so readers see all of it or nothing;
    ids carry random digits, so writers never collide.
    """

    def __init__(self, root: Path | str = DEFAULT_ROOT) -> None:
        self.root = Path(root)
        self.runs = self.root / "runs"

    def check_writable(self) -> None:
        """Fail now rather than after an hour of measuring."""
        with disk_errors(self.root):
            try_draft(self.draft_path("probe"))

    def draft_path(self, what: str) -> Path:
        """Return a hidden name for a folder that is not a Run yet; it tells who writes there."""
        return self.runs / f".draft-{_machine()}-{os.getpid()}-{what}-{secrets.token_hex(4)}"

    def save(self, run: Run, artifacts: Mapping[str, bytes | Path] | None = None) -> Path:
        """Add a Run that was measured here: from now on it is `last`."""
        final = self.add(run, artifacts)
        self._note_last(run.id)
        return final

    def add(self, run: Run, artifacts: Mapping[str, bytes | Path] | None = None) -> Path:
        """Write a Run and its artifacts by file name; return its folder.

        An artifact is its content, or a file on the store's disk, which is moved.
        """
        files = dict(artifacts or {})
        run = replace(run, artifacts=tuple(sorted(files)))
        draft, final = self.draft_path("run"), self.runs / run.id
        with disk_errors(self.root):
            draft.mkdir(parents=True)
            try:
                for name, content in files.items():
                    if isinstance(content, Path):
                        move_file(content, draft / name)
                    else:
                        write_file(draft / name, content)
                write_file(draft / RUN_FILE, run_to_json(run).encode())
                if final.exists():
                    raise UserError(f"Run {run.id} is already in {self.root}.")
                draft.rename(final)
                sync_folder(self.runs)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        self._sweep_stale(final)
        _ROOTS[run.id] = self.root.absolute()
        return final

    def ids(self) -> list[str]:
        """Return the ids of all complete Runs, oldest first."""
        if not self.runs.is_dir():
            output_folder(self.root, "--store")
            output_folder(self.runs, "--store")
            return []
        with disk_errors(self.root):
            return sorted(p.name for p in self.runs.iterdir() if not p.name.startswith("."))

    def load(self, name: str) -> Run:
        """Return a Run by its id, by a unique part of it, or by the word `last`.

        A part at the beginning or the end counts more than one in the middle.
        """
        return self._read(self.resolve(name))

    def resolve(self, name: str) -> str:
        """Return the full id that `name` stands for."""
        ids = self.ids()
        if not ids:
            raise UserError(f"There are no Runs in {self.root}.", "Measure one: steplab bench step")
        if name == "last":
            noted = self._noted_last()
            return noted if noted in ids else ids[-1]
        if name in ids:
            return name
        found = [i for i in ids if i.startswith(name) or i.endswith(name)]
        found = found or [i for i in ids if name in i]
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(
                f"{shorten(name)!r} fits {len(found)} Runs.", f"The newest is {found[-1]}."
            )
        nearest = difflib.get_close_matches(name[:LONGEST_NAME], ids, n=NEAREST, cutoff=0.0)
        listed = ", ".join(nearest)
        raise UserError(f"There is no Run {shorten(name)!r} in {self.root}; the nearest: {listed}.")

    def short_ids(self) -> dict[str, str]:
        """Return the random digits in which each id ends, by id; the id where those are not clear.

        `resolve` finds the id by what is returned.
        """
        ids = self.ids()
        ends = Counter(i[-RANDOM_DIGITS:] for i in ids)
        begins = {i[:RANDOM_DIGITS] for i in ids}
        short = {i: i[-RANDOM_DIGITS:] for i in ids}
        return {i: s if ends[s] == 1 and s not in begins else i for i, s in short.items()}

    def all(self) -> Iterator[tuple[str, Run | UserError]]:
        """Yield (id, Run), oldest first; a Run that cannot be read is yielded as its error."""
        for run_id in self.ids():
            try:
                yield run_id, self._read(run_id)
            except UserError as error:
                yield run_id, error

    def delete(self, run_id: str) -> None:
        """Remove a Run; the folder vanishes from listings in one step, then from the disk."""
        doomed = self.draft_path("deleted")
        with disk_errors(self.root):
            (self.runs / run_id).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # what is left here is swept later

    def _read(self, run_id: str) -> Run:
        text = read_input(self.runs / run_id / RUN_FILE)
        where = f"{shorten(run_id)}/{RUN_FILE}"
        run = run_from_json(text, where)
        if run.id != run_id:
            raise UserError(f"{where} is the record of another Run, {shorten(run.id)}.")
        _ROOTS[run.id] = self.root.absolute()
        return run

    def _note_last(self, run_id: str) -> None:
        try:
            write_file(self.root / LAST_FILE, run_id.encode())
        except OSError:  # the Run is safe; without a note the newest id counts
            with contextlib.suppress(OSError):
                (self.root / LAST_FILE).unlink()

    def _noted_last(self) -> str:
        try:
            return read_input(self.root / LAST_FILE).decode(errors="replace")
        except UserError:
            return ""

    def _sweep_stale(self, fresh: Path) -> None:
        """Remove the drafts of killed processes; `fresh` tells what time it is on that disk."""
        with contextlib.suppress(OSError):
            limit = fresh.stat().st_mtime - STALE_SECONDS
            for path in self.runs.glob(".*"):
                if path.stat().st_mtime < limit and not _has_a_writer(path):
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def _machine() -> str:
    """Return eight digits that stand for this machine; its name does not leave it."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _has_a_writer(draft: Path) -> bool:
    """Whether a draft belongs to a process of this machine that is still alive."""
    name = DRAFT.fullmatch(draft.name)
    return name is not None and name["machine"] == _machine() and is_alive(int(name["process"]))

"""summary.csv: one line for every profile in a folder, under columns that stay the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.core.atomic import disk_errors, draft_name
from steplab.core.errors import UserError
from steplab.core.input_file import open_input, shorten
from steplab.core.output_file import output_file
from steplab.report.export import csv_line

NAME = "summary.csv"


@dataclass(frozen=True)
class SummaryFile:
    """The summary.csv of a folder, which `flag` named."""

    folder: Path
    columns: Sequence[str]
    flag: str = "--out"

    @property
    def path(self) -> Path:
        """The file itself."""
        return self.folder / NAME

    def check(self) -> None:
        """Refuse what is no file or has other columns, before anything is measured."""
        if not output_file(self.path, self.flag).exists():
            return
        header = csv_line(self.columns).encode()
        with open_input(self.path) as file:
            first = file.readline(len(header))
        if first != header:
            raise UserError(
                f"{shorten(self.path)} has other columns.",
                f"Move it away, or give another {self.flag}.",
            )

    def append(self, cells: Sequence[object]) -> None:
        """Append one line.

        Several processes may append at once: the first one links a file with a complete header
        into place, and a line is a single write at the end of the file.
        """
        with disk_errors(self.folder, self.flag):
            self.folder.mkdir(parents=True, exist_ok=True)
            target = output_file(self.path, self.flag)
            self._create(target)
            with target.open("ab", buffering=0) as file:
                file.write(csv_line(cells).encode())

    def _create(self, path: Path) -> None:
        if path.exists():
            return
        draft = draft_name(path)
        draft.write_text(csv_line(self.columns), encoding="utf-8")
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()

"""summary.csv: one line for every profile in a folder, under columns that stay the same."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.core.atomic import CANNOT, append_row, disk_errors, draft_name
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
        into place.
        """
        with disk_errors(self.folder, self.flag):
            self.folder.mkdir(parents=True, exist_ok=True)
            target = output_file(self.path, self.flag)
            self._create(target)
            append_row(target, csv_line(cells).removesuffix("\n"))

    def _create(self, path: Path) -> None:
        if path.exists():
            return
        draft, header = draft_name(path), csv_line(self.columns).encode()
        try:
            draft.write_bytes(header)
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in (*CANNOT, errno.EPERM, errno.EMLINK):
                raise
            # A file system without hard links.
            with contextlib.suppress(FileExistsError), path.open("xb") as file:
                file.write(header)
        finally:
            draft.unlink(missing_ok=True)

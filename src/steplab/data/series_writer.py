"""Time-300B folders written series by series, each in as many pieces as one likes."""

from __future__ import annotations

import zlib
from array import array
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TextIO

import numpy as np
from numpy.typing import NDArray

from steplab.data.time300b_meta import META
from steplab.errors import UserError

PART_ELEMENTS = 2**30  # 4.29 GB of float32, as the published set is cut


class SeriesWriter:
    """Writes float32 series to a new Time-300B folder; 8 bytes per series are held in memory.

    Files get their names, and the folder its meta.json, at the end of the `with`: a folder that
    opens is complete. After an error nothing is left behind.
    """

    def __init__(self, folder: Path, part_elements: int = PART_ELEMENTS) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is not an empty folder.", "Give a new one.")
        self.folder, self.part_elements = folder, part_elements
        self.lengths = array("q")
        self.checksum = 0  # of all points, in their order
        self._open_length = 0
        self._counts: list[int] = []
        self._file: BinaryIO | None = None

    def append(self, points: NDArray[np.float32]) -> None:
        """Add points to the series that is being written."""
        data = points.astype("<f4", copy=False)
        self.checksum = zlib.crc32(data.tobytes(), self.checksum)
        self._open_length += len(data)
        while len(data):
            if self._file is None or self._counts[-1] == self.part_elements:
                self._next_part()
            assert self._file is not None
            piece = data[: self.part_elements - self._counts[-1]]
            self._file.write(piece.tobytes())
            self._counts[-1] += len(piece)
            data = data[len(piece) :]

    def end_series(self) -> None:
        """End the series; what follows belongs to the next one."""
        self.lengths.append(self._open_length)
        self._open_length = 0

    def __enter__(self) -> SeriesWriter:
        self._made_folder = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._file is not None:
                self._file.close()
            if kind is None and len(self.lengths):
                self._name_files()
                return
        except BaseException:  # a full disk shows when the last bytes are flushed
            self._leave_nothing()
            raise
        self._leave_nothing()

    def _next_part(self) -> None:
        if self._file is not None:
            self._file.close()
        self._counts.append(0)
        self._file = self._unnamed(len(self._counts)).open("wb")

    def _unnamed(self, number: int) -> Path:
        return self.folder / f"part-{number}.unfinished"

    def _name_files(self) -> None:
        if not self._counts:  # series without a point
            self._next_part()
            assert self._file is not None
            self._file.close()
        names = [f"data-{k}-of-{len(self._counts)}.bin" for k in range(1, len(self._counts) + 1)]
        for number, name in enumerate(names, 1):
            self._unnamed(number).rename(self.folder / name)
        draft = self.folder / f"{META}.unfinished"
        with draft.open("w", encoding="utf-8") as file:
            self._write_meta(file, dict(zip(names, self._counts, strict=True)))
        draft.rename(self.folder / META)

    def _write_meta(self, file: TextIO, files: dict[str, int]) -> None:
        """Write series by series: as one object a million of them would take 300 MB."""
        listed = ", ".join(f'"{name}": {count}' for name, count in files.items())
        file.write(f'{{"num_sequences": {len(self.lengths)}, "dtype": "float32", ')
        file.write(f'"files": {{{listed}}}, "scales": [')
        offset = 0
        for number, length in enumerate(self.lengths):
            comma = ",\n" if number else ""
            file.write(f'{comma}{{"offset": {offset}, "length": {length}}}')
            offset += length
        file.write("]}\n")

    def _leave_nothing(self) -> None:
        for path in self.folder.iterdir():  # it was empty
            path.unlink()
        if self._made_folder:
            self.folder.rmdir()

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


class ListSeries:
    """A SeriesSet over arrays, the plainest one; counts the points that were read."""

    def __init__(self, arrays, name: str = "list"):
        self.name = name
        self.arrays = [np.asarray(array, np.float32) for array in arrays]
        self.lengths = np.array([len(array) for array in self.arrays], np.int64)
        self.points_read = 0

    def __len__(self) -> int:
        return len(self.arrays)

    def read(self, index: int, start: int, stop: int):
        self.points_read += stop - start
        return self.arrays[index][start:stop]


def write_raw(folder: Path, parts: dict[str, np.ndarray], scales: list[dict], /, **changes) -> Path:
    """Write a Time-300B folder by hand, without the writer under test."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in parts.items():
        (folder / name).write_bytes(array.astype(array.dtype.newbyteorder("<")).tobytes())
    meta = {
        "num_sequences": len(scales),
        "dtype": next(iter(parts.values())).dtype.name,
        "files": {name: len(array) for name, array in parts.items()},
        "scales": scales,
        **changes,
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder

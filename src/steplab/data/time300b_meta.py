"""The meta.json of a Time-300B folder, checked and turned into arrays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steplab.errors import UserError, did_you_mean

META = "meta.json"
PART = re.compile(r"data-(\d+)-of-(\d+)\.bin")
FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS)


@dataclass(frozen=True)
class Meta:
    """What meta.json says. Offsets, lengths and counts are in elements, not bytes."""

    dtype: np.dtype[Any]  # little-endian
    parts: tuple[tuple[str, int], ...]  # (file name, elements) in the order of the offsets
    offsets: NDArray[np.int64]  # [series]
    lengths: NDArray[np.int64]  # [series]
    means: NDArray[np.float64] | None  # [series]; None when nothing was stored scaled
    stds: NDArray[np.float64] | None


def read_meta(path: Path) -> Meta:
    """Read and check a meta.json; every fault is a UserError that names the file and the place.

    It can be 10 MB of JSON objects, of which two int64 arrays are kept.
    """
    data = _load(path)
    missing = [key for key in ("num_sequences", "dtype", "files", "scales") if key not in data]
    if missing:
        raise UserError(f"{path} lacks {', '.join(map(repr, missing))}.")
    dtype, parts, scales = _dtype(path, data["dtype"]), _parts(path, data["files"]), data["scales"]
    if not isinstance(scales, list) or not all(isinstance(scale, dict) for scale in scales):
        raise UserError(f"{path}: 'scales' must be a list of objects.")
    if data["num_sequences"] != len(scales):
        said = json.dumps(data["num_sequences"])[:20]
        raise UserError(f"{path}: 'num_sequences' is {said}, but 'scales' has {len(scales):,}.")
    if not scales:
        raise UserError(f"{path} holds no series.")
    offsets, lengths = _integers(path, scales, "offset"), _integers(path, scales, "length")
    _check_ends(path, offsets, lengths, sum(count for _, count in parts))
    return Meta(dtype, parts, offsets, lengths, *_scaling(path, scales))


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not JSON: {reason}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must be a JSON object with 'dtype', 'files' and 'scales'.")
    return data


def _dtype(path: Path, name: Any) -> np.dtype[Any]:
    if name not in DTYPES:
        raise UserError(f"{path}: unknown dtype {name!r}.", did_you_mean(str(name), DTYPES))
    return np.dtype(name).newbyteorder("<")


def _parts(path: Path, files: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(files, dict) or not files:
        raise UserError(f"{path}: 'files' must name the .bin files and their elements.")
    numbered: dict[int, tuple[str, int]] = {}
    for name, count in files.items():
        match = PART.fullmatch(name)
        if match is None:
            raise UserError(f"{path}: the file {name!r} is not called data-<k>-of-<n>.bin.")
        if type(count) is not int or count < 0:
            raise UserError(f"{path}: {name} has {json.dumps(count)[:20]} elements.")
        if int(match[2]) != len(files) or int(match[1]) in numbered:
            raise UserError(
                f"{path}: {name} is listed among {len(files)} files.", "One is missing?"
            )
        numbered[int(match[1])] = (name, count)
    return tuple(part for _, part in sorted(numbered.items()))


def _integers(path: Path, scales: list[dict[str, Any]], key: str) -> NDArray[np.int64]:
    values = [scale.get(key) for scale in scales]
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value < 2**62:
            said = "missing" if value is None else json.dumps(value)[:20]
            raise UserError(f"{path}: '{key}' of series {index} is {said}.")
    return np.array(values, np.int64)


def _check_ends(
    path: Path, offsets: NDArray[np.int64], lengths: NDArray[np.int64], total: int
) -> None:
    behind = np.flatnonzero(offsets + lengths > total)
    if len(behind):
        index = int(behind[0])
        raise UserError(
            f"{path}: series {index} ends at element {offsets[index] + lengths[index]:,}, but its "
            f"files hold {total:,} ({len(behind):,} series run past the end)."
        )


def _scaling(
    path: Path, scales: list[dict[str, Any]]
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    if not any("mean" in scale or "std" in scale for scale in scales):
        return None, None
    for index, scale in enumerate(scales):
        if ("mean" in scale) != ("std" in scale):
            raise UserError(f"{path}: series {index} has only one of 'mean' and 'std'.")
    means = _floats(path, "mean", (scale.get("mean", 0.0) for scale in scales))
    stds = _floats(path, "std", (scale.get("std", 1.0) for scale in scales))
    if (stds < 0).any():
        raise UserError(f"{path}: 'std' of series {int(np.argmax(stds < 0))} is negative.")
    return means, stds


def _floats(path: Path, key: str, values: Iterable[Any]) -> NDArray[np.float64]:
    numbers = []
    for index, value in enumerate(values):
        if type(value) not in (int, float) or not abs(value) < 1e300:
            raise UserError(f"{path}: '{key}' of series {index} is {json.dumps(value)[:20]}.")
        numbers.append(float(value))
    return np.array(numbers, np.float64)

"""Series as text: .jsonl with one series per line, .json with a list of them.

A series is {"sequence": [...]} or a bare list of numbers; null and NaN are missing points. Text
has no fixed width, so it is parsed once and kept in memory as float32.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError
from steplab.core.input_file import check_json_size, check_memory, open_input, read_input
from steplab.data.series import InMemorySeries, to_float32

NUMBERS = {int, float, type(None)}  # without bool: true is not a measurement
KEY = "sequence"


def read_jsonl(path: Path) -> InMemorySeries:
    """Read a file with one series per line; blank lines are skipped."""
    series = []
    try:
        with open_input(path) as file:
            # As float32, the points take twice the bytes of their text at most: "1,".
            check_memory(2 * os.fstat(file.fileno()).st_size, path)
            for number, line in enumerate(file, 1):
                if line.strip():
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    where = f"{path}, line {number}"
                    series.append(_points(_parse(text, where), where))
    except UnicodeDecodeError as error:
        raise _not_text(path, error) from None
    return InMemorySeries(str(path), series)


def read_json(path: Path) -> InMemorySeries:
    """Read a list of series, or a single one."""
    try:
        data = _parse(read_input(path).decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise _not_text(path, error) from None
    if not isinstance(data, (list, dict)):
        raise UserError(f"{path} is {_kind(data)}, not a list of series.")
    if isinstance(data, dict) or (data and not isinstance(data[0], (list, dict))):
        return InMemorySeries(str(path), [_points(data, str(path))])
    series = [_points(item, f"{path}, series {index}") for index, item in enumerate(data)]
    return InMemorySeries(str(path), series)


def _parse(text: str, where: str) -> Any:
    check_json_size(len(text), where)
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(f"{where} is nested too deeply to be a series.") from None
    except ValueError as error:
        hint = ""
        if "Extra data" in str(error) and where.endswith(".json"):
            hint = "If every line is one series, name the file .jsonl."
        raise UserError(f"{where} is not JSON: {error}.", hint) from None


def _points(item: Any, where: str) -> NDArray[np.float32]:
    if isinstance(item, dict):
        if KEY not in item:
            keys = ", ".join(map(repr, list(item)[:5])) or "none"
            raise UserError(f"{where} has no key {KEY!r} (its keys: {keys}).")
        item = item[KEY]
    if not isinstance(item, list):
        raise UserError(f"{where} is {_kind(item)}, not a list of numbers.")
    other = set(map(type, item)) - NUMBERS
    if other:
        position = next(i for i, value in enumerate(item) if type(value) in other)
        value = item[position]
        hint = "Write each channel as a series of its own." if isinstance(value, list) else ""
        raise UserError(f"{where}, point {position} is {_kind(value)}, not a number.", hint)
    try:
        return to_float32(np.array(item, np.float64))
    except OverflowError:
        raise UserError(f"{where} has an integer that does not fit into a float.") from None


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value[:20]!r}"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return json.dumps(value)[:20]


def _not_text(path: Path, error: UnicodeDecodeError) -> UserError:
    return UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).")


FORMAT = {".jsonl": read_jsonl, ".json": read_json}

"""Rows: the tables of a Trace as plain tuples, to be compared with what a test wrote."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from typing import Any

from steplab.trace.events import Trace

TABLES = ("ops", "python", "ranges", "device_ranges", "calls", "device", "memory")
JSON_TEXTS = ("shapes", "strides", "dtypes", "values")
CATEGORIES = {
    "cpu_op": "ops",
    "python_function": "python",
    "user_annotation": "ranges",
    "gpu_user_annotation": "device_ranges",
    "cuda_runtime": "calls",
    "kernel": "device",
    "gpu_memcpy": "device",
    "gpu_memset": "device",
}
KINDS = {"kernel": 0, "gpu_memcpy": 1, "gpu_memset": 2}


def rows_of(trace: Trace) -> dict[str, list[tuple[Any, ...]]]:
    """Return every table as a sorted list of rows, all codes replaced with what they stand for."""
    return {name: sorted(_table_rows(trace, name), key=repr) for name in TABLES}


def _table_rows(trace: Trace, name: str) -> list[tuple[Any, ...]]:
    table = getattr(trace, name)
    columns = []
    for column in fields(table):
        values = getattr(table, column.name).tolist()
        if column.name == "name":
            values = [trace.texts[code] for code in values]
        elif column.name == "thread":
            values = [trace.threads[code] for code in values]
        elif column.name in JSON_TEXTS:
            values = [json.loads(trace.text(code) or "null") for code in values]
        columns.append(values)
    return list(zip(*columns, strict=True))


def rows_in_file(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return the same rows by other means: the standard library, one event at a time."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    document = json.loads(text, parse_float=Decimal)
    base = document.get("baseTimeNanoseconds", 0)
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
    for event in document["traceEvents"]:
        args = event.get("args", {})
        start = base + int(event.get("ts", 0) * 1000)
        if event["ph"] == "i" and event["name"] == "[memory]":
            numbers = args["Bytes"], args["Addr"], args["Total Allocated"]
            rows["memory"].append((start, *numbers, args["Device Type"] != 0))
        elif event["ph"] == "X" and event["cat"] in CATEGORIES:
            name = CATEGORIES[event["cat"]]
            place = f"{event['pid']}/{event['tid']}"
            span = (start, int(event["dur"] * 1000), event["name"], place)
            rows[name].append((*span, *_own_columns(name, event["cat"], args)))
    return {name: sorted(listed, key=repr) for name, listed in rows.items()}


def _own_columns(table: str, category: str, args: dict[str, Any]) -> tuple[Any, ...]:
    if table == "ops":
        own = args.get("Sequence number", -1), args.get("Fwd thread id", 0)
        keys = ("Input Dims", "Input Strides", "Input type", "Concrete Inputs")
        return (*own, *(args.get(key) for key in keys))
    if table == "calls":
        return (args["correlation"],)
    if table == "device":
        x, y, z = args.get("grid", (0, 0, 0))
        numbers = args["device"], args["correlation"], args.get("bytes", 0)
        return (KINDS[category], *numbers, args.get("graph id", 0), x * y * z)
    return ()

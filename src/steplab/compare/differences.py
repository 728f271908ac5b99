"""What two Runs were asked for, where they ran and what executed: the fields that differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steplab.codec import encode
from steplab.record import Column, Run, Table
from steplab.record.table import Cell

ABSENT = "not set"
GROUPS = ("recipe", "config", "spec", "ran", "compilation", "environment")


def differences_table(a: Run, b: Run) -> Table | None:
    """Return one row per field that differs; None when every condition was the same."""
    left, right = _conditions(a), _conditions(b)
    rows = []
    for field in sorted(dict.fromkeys([*left, *right]), key=lambda f: GROUPS.index(f[0])):
        one, other = (_text(side.get(field, ABSENT)) for side in (left, right))
        if one != other:
            rows.append((*field, one, other))
    if not rows:
        return None
    columns = (Column("of"), Column("field"), Column("A"), Column("B"))
    return Table("what differs", columns, tuple(rows))


def _conditions(run: Run) -> dict[tuple[str, str], Cell]:
    """Every condition of a Run by (group, field)."""
    spec, ran = encode(run.spec), encode(run.ran) or {}
    groups: dict[str, Mapping[str, Any]] = {
        "recipe": spec.pop("recipe")["techniques"],
        "config": spec.pop("config"),
        "spec": spec,
        # Launches and kernels are results, and told as what moved.
        "ran": {key: ran[key] for key in ("impls", "matmul_dtypes", "optimizer") if key in ran},
        "compilation": _compilation(run),
        "environment": encode(run.environment),
    }
    return {
        (group, name): value
        for group, fields in groups.items()
        for name, value in _flat(fields).items()
    }


def _compilation(run: Run) -> Mapping[str, Any]:
    if run.compilation is None:
        return {}
    seen = run.compilation
    counts = {"graphs": seen.graphs, "breaks": sum(seen.breaks.values())}
    return counts | {"recompiles": len(seen.recompiles), "cudagraph skips": seen.cudagraph_skips}


def _flat(value: Any, name: str = "") -> dict[str, Cell]:
    """Nested data as one level: {"precision": {"dtype": "bf16"}} is {"precision.dtype": "bf16"}."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return {name: "/".join(value)}
    if isinstance(value, list):
        value = {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {name: value}
    flat: dict[str, Cell] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{name}.{key}" if name else str(key))
    return flat


def _text(value: Cell) -> Cell:
    """Texts stay, an empty one is said; numbers become texts: a column of both is no number."""
    if value is None or value == "":
        return ABSENT
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Whether two Runs did the same work, and in which conditions they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steplab.core import Cell, Column, Run, Table
from steplab.core.codec import encode


def work_differences(a: Run, b: Run) -> tuple[str, ...]:
    """Return in words why the work differs; nothing when it is the same.

    The same work: workload, mode, batch and accumulation are equal, and so is the config, or
    tokens, parameters and model FLOPs are (a setting such as fused projections changes none of
    them). Two files of the user's own count as one workload when tokens and parameters agree.
    """
    differences = [
        f"{name} {left} and {right}"
        for name in ("mode", "batch", "accumulate")
        if (left := getattr(a.spec, name)) != (right := getattr(b.spec, name))
    ]
    if a.spec.workload != b.spec.workload and not _own_files_agree(a, b):
        differences.insert(0, f"workload {a.spec.workload} and {b.spec.workload}")
    elif a.spec.config != b.spec.config and not (_same_size(a, b) and _same_flops(a, b)):
        differences += _config(a, b)
    return tuple(differences)


def _config(a: Run, b: Run) -> list[str]:
    names = dict.fromkeys([*a.spec.config, *b.spec.config])
    pairs = [(name, a.spec.config.get(name), b.spec.config.get(name)) for name in names]
    return [f"{name} {left} and {right}" for name, left, right in pairs if left != right]


def _own_files_agree(a: Run, b: Run) -> bool:
    own = all(":" in run.spec.workload for run in (a, b))
    return own and a.spec.config == b.spec.config and _same_size(a, b)


def _same_size(a: Run, b: Run) -> bool:
    """Tokens of a step and parameters of the model are known and equal."""
    if a.work is None or b.work is None or a.parameters is None:
        return False
    return a.work.tokens == b.work.tokens and a.parameters == b.parameters


def _same_flops(a: Run, b: Run) -> bool:
    if a.work is None or b.work is None or a.work.model is None:
        return False
    return a.work.model == b.work.model


ABSENT = "not set"
GROUPS = ("recipe", "config", "spec", "ran", "compilation", "environment")


def condition_diff(a: Run, b: Run) -> Table | None:
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
    del spec["overrides"]  # the config has their values
    groups: dict[str, Mapping[str, Any]] = {
        "recipe": spec.pop("recipe")["techniques"],
        "config": spec.pop("config"),
        "spec": spec,
        # Launches and kernels are results; `time_diff` has them.
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
    """Return every value as text, so that a column of texts and numbers is drawn as text."""
    if value is None or value == "":
        return ABSENT
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Stored documents of earlier versions, read as this version writes them.

run.json, ladder.json and checkpoint.json share one version number. To rename a stored key, add one
to VERSION and append to STEPS a function that turns documents of the version before into the new
one. A step touches named paths only: a config holds names of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from steplab.core.errors import UserError

VERSION = 2
Kind = Literal["run", "ladder", "checkpoint"]


def check_version(version: Any, where: str) -> None:
    """Refuse a document that a newer steplab has written; `where` names it."""
    if not isinstance(version, int) or version < 1:
        raise UserError(f"{where} is not a document of steplab's: it has no version.")
    if version > VERSION:
        raise UserError(
            f"{where} has version {version}; this steplab reads up to {VERSION}.",
            "Upgrade steplab to read it.",
        )


def upgrade(kind: Kind, version: int, data: Any) -> Any:
    """Return the content of a document of `version` in its present form; changes `data`."""
    for step in STEPS[max(version, 1) - 1 :]:
        step(kind, data)
    return data


def _american_spelling(kind: Kind, data: Any) -> None:
    """1 to 2: keys and names in the spelling of torch."""
    if kind == "checkpoint":
        for settings in _objects(data, "progress.spec.settings"):
            _rename(settings, "normalise", "normalize")
    elif kind == "ladder":
        for rung in _objects(data, "rungs.*"):
            _rename(rung, "along", "requires")
    elif kind == "run":
        for terms in _objects(data, "profile.budget.steps.*.terms"):
            _rename(terms, "synchronisation", "synchronization")
        for category in _objects(data, "profile.budget.steps.*.categories.*"):
            _rename(category, "modelled_ms", "modeled_ms")
            _replace(category, "name", "normalisation", "normalization")
        for finding in _objects(data, "findings.*"):
            _replace(finding, "rule", "synchronisation", "synchronization")


STEPS: tuple[Callable[[Kind, Any], None], ...] = (_american_spelling,)  # from version 1, 2, ...


def _objects(data: Any, path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects at a dotted path; `*` stands for every item of a list."""
    found = [data]
    for key in path.split("."):
        if key == "*":
            found = [item for value in found if isinstance(value, list) for item in value]
        else:
            found = [value.get(key) for value in found if isinstance(value, dict)]
    return (value for value in found if isinstance(value, dict))


def _rename(record: dict[str, Any], old: str, new: str) -> None:
    """Rename a key in its place: the terms of a budget are shown in the order they are stored."""
    items = [(new if key == old else key, value) for key, value in record.items()]
    record.clear()
    record.update(items)


def _replace(record: dict[str, Any], key: str, old: str, new: str) -> None:
    """Replace one value of a key by another."""
    if record.get(key) == old:
        record[key] = new

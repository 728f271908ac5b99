"""Predictions beside the Runs of a store, found again by the step that they are about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from steplab.core import Run, RunSpec
from steplab.core.atomic import disk_errors, write_file
from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.core.input_file import parse_json, read_input, shorten
from steplab.core.prediction import Prediction, work_key
from steplab.hardware.catalog import find_card
from steplab.store.store import Store

FOLDER = "predictions"
LARGEST = 2**20  # bytes; ours have about 3,000


def save_prediction(store: Store, prediction: Prediction) -> Path:
    """Write a prediction; a later one of the same step on the same card replaces it."""
    path = store.root / FOLDER / _name(prediction.spec, prediction.card)
    with disk_errors(store.root):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(encode(prediction), indent=1).encode())
    return path


def predictions(store: Store) -> Iterator[Prediction]:
    """Yield all that can be read."""
    for path in sorted((store.root / FOLDER).glob("*.json")):
        yield _read(path)


def prediction_of(store: Store, run: Run) -> Prediction | None:
    """Return what was predicted of a Run's step on its device; None where nothing was."""
    path = store.root / FOLDER / _name(run.spec, device_of(run))
    return _read(path) if path.is_file() else None


def device_of(run: Run) -> str:
    """Return what a Run ran on: the card's name in the catalog, or the CPU's."""
    if run.spec.device != "cuda":
        return run.environment.cpu
    card = find_card(run.environment.device_name)
    return card.name if card else run.environment.device_name


def _name(spec: RunSpec, device: str) -> str:
    plain = "".join(letter if letter.isalnum() else "_" for letter in device)
    return f"{work_key(spec)}-{plain}.json"


def _read(path: Path) -> Prediction:
    where = f"The prediction {shorten(path.name)}"
    found = parse_json(read_input(path, LARGEST), where)
    prediction = decode(Prediction, found, where)
    if not isinstance(prediction, Prediction):
        raise UserError(f"{where} is none.")
    return prediction

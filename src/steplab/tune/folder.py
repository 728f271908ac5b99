"""The folder of a ladder: what an interrupted search goes on from. No torch.

`<store>/ladders/<id>/` holds ladder.json, gate.json (the shapes at which numerics are compared),
the references of the gate, and at the end recipe.toml and report.html.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steplab.core import Environment, RunSpec
from steplab.core.atomic import disk_errors, write_file
from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.core.input_file import parse_json, read_input, shorten
from steplab.core.ladder import Ladder
from steplab.core.run import now
from steplab.core.upgrade import VERSION, check_version, upgrade
from steplab.store import Store, dated_id, machine_key
from steplab.store.store import is_plain_name
from steplab.tune.options import TuneOptions
from steplab.verify.shapes import GateShape

LADDER_FILE, GATE_FILE = "ladder.json", "gate.json"


class LadderFolder:
    """One ladder on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.references = path / "references"

    def save(self, ladder: Ladder) -> None:
        """Write the ladder, whole or not at all."""
        self._write(LADDER_FILE, {"steplab_ladder": VERSION, **encode(ladder)})

    def load(self) -> Ladder:
        """Read the ladder; what is damaged is a UserError."""
        data, where = self._read(LADDER_FILE), str(self.path / LADDER_FILE)
        version = data.pop("steplab_ladder", 1) if isinstance(data, dict) else 1
        check_version(version, where)
        ladder: Ladder = decode(Ladder, upgrade("ladder", version, data), where)
        return ladder

    def save_shapes(self, shapes: Sequence[GateShape]) -> None:
        """Remember where fp64 fits."""
        self._write(GATE_FILE, encode(list(shapes)))

    def load_shapes(self, spec: RunSpec) -> list[GateShape]:
        """Return the shapes for the step of `spec`; nothing before they are found."""
        if not (self.path / GATE_FILE).exists():
            return []
        where = str(self.path / GATE_FILE)
        shapes: tuple[GateShape, ...] = decode(tuple[GateShape, ...], self._read(GATE_FILE), where)
        step = (spec.workload, spec.source)
        if any((shape.spec.workload, shape.spec.source) != step for shape in shapes):
            raise self.other_step(GATE_FILE)
        if not all(is_plain_name(shape.name) for shape in shapes):  # it names files
            raise self.other_step(GATE_FILE)
        return list(shapes)

    def other_step(self, name: str) -> UserError:
        """Return the error for a file that belongs to another search."""
        return UserError(
            f"{self.path / name} belongs to another step.", "Remove its folder to begin anew."
        )

    def _write(self, name: str, data: Any) -> None:
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_file(self.path / name, json.dumps(data, indent=1, allow_nan=False).encode())

    def _read(self, name: str) -> Any:
        path = self.path / name
        try:
            return parse_json(read_input(path), shorten(path))
        except UserError as error:
            hint = error.suggestion or "Remove its folder to begin anew."
            raise UserError(error.message, hint) from None


def open_ladder(
    store: Store,
    spec: RunSpec,
    environment: Environment,
    options: TuneOptions,
) -> tuple[LadderFolder, Ladder]:
    """Go on with the newest unfinished ladder of this step on this machine, or begin one.

    What the gate asks for must be the same, or its verdicts would be those of another gate. A
    finished ladder is never taken up again: asking again measures again.
    """
    gate = (options.objective, options.also_batch, options.memory_limit, *options.allowed)
    key = machine_key(environment, encode(spec), *gate)
    root = store.root / "ladders"
    # All are looked at: where the clock went back, an older ladder has the newer name. A folder
    # without the file is one that was just being made when its process was killed.
    for path in sorted(root.glob(f"*-{key}-*/{LADDER_FILE}"), reverse=True):
        folder = LadderFolder(path.parent)
        ladder = folder.load()
        if not ladder.finished:
            if encode(ladder.spec) != encode(spec):
                raise folder.other_step(LADDER_FILE)
            return folder, ladder
    name = dated_id(key)
    ladder = Ladder(
        name,
        spec,
        environment,
        objective=options.objective,
        created=now(),
        allowed=options.allowed,
        winner=spec.recipe,
        own=options.own,
    )
    folder = LadderFolder(root / name)
    folder.save(ladder)
    return folder, ladder

"""Evidence of the references on disk, where every candidate's process finds it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from steplab.engine.gate.evidence import Evidence
from steplab.engine.gate.shapes import TRUTH, references_of
from steplab.store.atomic import disk_errors


def reference_path(folder: Path, shape: str, name: str) -> Path:
    """Return the file of one reference: the shape's name, and one of `references_of`."""
    return folder / f"{shape}-{name}.pt"


def save(evidence: Evidence, path: Path) -> None:
    """Write evidence; a reader sees all of it or nothing."""
    draft = path.with_suffix(".draft")
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(asdict(evidence), draft)
        draft.replace(path)


def load_references(folder: Path, shape: str, dtype: str) -> list[Evidence]:
    """Return the truth, and the peers of what declares `dtype`."""
    names = (TRUTH, *references_of(dtype))
    return [load(reference_path(folder, shape, name)) for name in names]


def load(path: Path) -> Evidence:
    """Read evidence; nothing in the file is executed."""
    return Evidence(**torch.load(path, weights_only=True))

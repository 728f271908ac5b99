"""A checkpoint as a Time-MoE folder: config.json and model.safetensors."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from steplab.codec import decode
from steplab.engine.checkpoint.folder import MODEL_FILE, find, new_draft
from steplab.engine.checkpoint.integrity import read_intact
from steplab.errors import UserError
from steplab.spec.training import TrainSpec
from steplab.store.atomic import disk_errors, sync_folder, write_file
from steplab.workloads.tsmoe.config import TsmoeConfig
from steplab.workloads.tsmoe.time_moe import parts, render_config
from steplab.workloads.tsmoe.time_moe.files import SINGLE_FILE
from steplab.workloads.tsmoe.time_moe.settings import CONFIG_FILE


@dataclass(frozen=True)
class Exported:
    """What was written."""

    source: Path  # the checkpoint
    folder: Path
    tensors: int
    size: int  # bytes of the tensor file


def export_time_moe(path: Path, folder: Path) -> Exported:
    """Write the weights of the checkpoint `path` into a new `folder`, bit for bit, as fp32.

    The folder is complete or absent. A model that Time-MoE has no place for is refused.
    """
    path = find(path)
    spec: TrainSpec = decode(
        TrainSpec, dict(read_intact(path).progress.spec), f"{path / 'checkpoint.json'}: spec"
    )
    if spec.workload != "tsmoe":
        raise UserError(f"{path} is a model of {spec.workload}, and Time-MoE is made of tsmoe.")
    config: TsmoeConfig = decode(TsmoeConfig, dict(spec.config), f"{path}: config")
    text = render_config(config)
    if folder.exists():
        raise UserError(f"{folder} exists already.", "Name a folder that does not.")
    with disk_errors(folder.parent, "--out"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        return _write(path, config, text, folder)


def _write(path: Path, config: TsmoeConfig, text: bytes, folder: Path) -> Exported:
    from steplab.engine.checkpoint.tensor_file import read_tensors, write_tensors

    saved = read_tensors(path / MODEL_FILE)
    tensors = {name: saved[part.parameter][part.at] for name, part in parts(config).items()}
    draft = new_draft(folder.parent)
    try:
        seal = write_tensors(draft / SINGLE_FILE, tensors)
        write_file(draft / CONFIG_FILE, text)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(folder.parent)
    return Exported(path, folder, len(tensors), seal.size)

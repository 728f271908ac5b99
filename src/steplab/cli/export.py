"""Write a checkpoint as a Time-MoE folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from steplab.cli.command import Command
from steplab.cli.flags import folder_to_write
from steplab.core import TrainSettings
from steplab.core.units import bytes_


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    folder = Path(TrainSettings().checkpoint_dir)
    about = "checkpoint, or folder of checkpoints (its newest is exported)"
    add("checkpoint", nargs="?", type=Path, default=folder, help=about)
    add("--out", type=folder_to_write("--out"), default="time-moe", help="folder to create")


def _run(args: argparse.Namespace) -> int:
    from steplab.train.pretrained import export_time_moe

    done = export_time_moe(args.checkpoint, args.out)
    print(f"exported {done.source} to {done.folder}")
    print(f"config.json, model.safetensors: {done.tensors} tensors, {bytes_(done.size)}")
    return 0


COMMAND = Command(_flags, _run)

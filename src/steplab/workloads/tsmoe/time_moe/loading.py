"""A Time-MoE folder to a model: everything is checked before anything is changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from steplab.errors import UserError
from steplab.workloads.tsmoe.config import TsmoeConfig
from steplab.workloads.tsmoe.time_moe.files import TensorFolder, open_tensors
from steplab.workloads.tsmoe.time_moe.names import Part, parts
from steplab.workloads.tsmoe.time_moe.settings import read_config

if TYPE_CHECKING:
    from steplab.workloads.tsmoe.model import Tsmoe

DTYPES = ("F32", "BF16", "F16")  # those whose every value fp32 can hold
HEAD = re.compile(r"lm_heads\.\d+\.out_layer\.weight")
LISTED = 5  # names in one error message


def load_time_moe(folder: Path | str) -> tuple[TsmoeConfig, Tsmoe]:
    """Return (config, model) of a folder with config.json and safetensors; fp32, on the host."""
    from steplab.workloads.tsmoe.model import Tsmoe

    folder = Path(folder)
    config = read_config(folder)
    with open_tensors(folder) as tensors:
        _check(tensors, parts(config))
    model = Tsmoe(config)
    load_weights(folder, model)
    return config, model


def load_weights(folder: Path, model: Tsmoe) -> None:
    """Copy the weights of a folder into a model of that shape, all or, on any error, none."""
    import torch

    wanted = parts(model.config)
    with open_tensors(folder) as tensors, torch.no_grad():
        _check(tensors, wanted)
        own = dict(model.named_parameters())
        for name, part in wanted.items():
            own[part.parameter][part.at].copy_(tensors.read(name))


def _check(tensors: TensorFolder, wanted: dict[str, Part]) -> None:
    """Raise a UserError that names what is missing, extra, misshapen or of another dtype."""
    here, there = wanted.keys(), tensors.shapes.keys()
    misshapen = [
        f"{name} (saved {list(tensors.shapes[name])}, model {list(wanted[name].shape)})"
        for name in sorted(here & there)
        if tensors.shapes[name] != wanted[name].shape
    ]
    faults = {
        "missing": sorted(here - there),
        "extra": sorted(there - here),
        "misshapen": misshapen,
    }
    listed = "; ".join(f"{fault}: {_some(names)}" for fault, names in faults.items() if names)
    if listed:
        raise UserError(
            f"{tensors.name} does not fit its config.json ({listed}).", _heads(tensors, wanted)
        )
    odd = sorted({code for code in tensors.dtypes.values() if code not in DTYPES})
    if odd:
        raise UserError(
            f"{tensors.name} holds {', '.join(odd)}, which fp32 cannot hold exactly.",
            f"Save the weights as one of {', '.join(DTYPES)}.",
        )


def _heads(tensors: TensorFolder, wanted: dict[str, Part]) -> str:
    """Say so when the two disagree on the horizons: some copies list one head too many."""
    asked, saved = (
        sum(map(bool, map(HEAD.fullmatch, names))) for names in (wanted, tensors.shapes)
    )
    if asked == saved:
        return ""
    return f"config.json lists {asked} horizon_lengths, but the weights have {saved} heads."


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + rest

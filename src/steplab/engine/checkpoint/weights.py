"""A model's parameters and persistent buffers, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steplab.errors import Unsupported, UserError

LISTED = 5  # names in one error message


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what is saved of a model; a shared tensor once, under the first of its names."""
    state = _state(model)
    return {name: state[name] for name in _saved_names(state).values()}


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name of every parameter by its `id`; a shared one has the first of its names."""
    named = sorted(model.named_parameters(remove_duplicate=False), reverse=True)
    return {id(parameter): name for name, parameter in named}


def check_weights(model: nn.Module, saved: Mapping[str, Tensor], where: str) -> None:
    """Raise a UserError that lists what is missing, extra or of another shape or dtype."""
    wanted = model_tensors(model)
    misshapen = [
        f"{name} (saved {_shape(saved[name])}, model {_shape(wanted[name])})"
        for name in sorted(wanted.keys() & saved.keys())
        if _shape(saved[name]) != _shape(wanted[name])
    ]
    faults = {
        "missing": sorted(wanted.keys() - saved.keys()),
        "extra": sorted(saved.keys() - wanted.keys()),
        "misshapen": misshapen,
    }
    listed = "; ".join(f"{fault}: {some(names)}" for fault, names in faults.items() if names)
    if listed:
        raise UserError(
            f"{where} does not fit the model ({listed}).",
            "Build the model with the settings that it was trained with.",
        )


def apply_weights(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy checked tensors into the model, in place."""
    names = _saved_names(_state(model))
    model.load_state_dict({name: saved[first] for name, first in names.items()}, strict=True)


def some(names: Iterable[str]) -> str:
    """List a few names and the number of the rest."""
    known = list(names)
    rest = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    return ", ".join(known[:LISTED]) + rest


def _state(model: nn.Module) -> dict[str, Tensor]:
    # keep_vars: the tensors themselves, so that shared ones can be told by their identity.
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    odd = sorted(name for name, value in state.items() if not isinstance(value, torch.Tensor))
    if odd:
        raise Unsupported(f"A checkpoint holds tensors only, but the model has {some(odd)}.")
    return state


def _saved_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(state[name]), name) for name in sorted(state)}


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

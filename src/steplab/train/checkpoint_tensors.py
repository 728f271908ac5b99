"""The tensors of a checkpoint: weights, optimizer state and random generators.

Optimizer state is stored by parameter name, so that a changed order cannot mix it up.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steplab.core.codec import encode
from steplab.core.errors import Unsupported, UserError
from steplab.core.input_file import shorten
from steplab.modules.optimizer import clear_moments, moments, packed_state, state_keys
from steplab.parallel.world import gather_texts
from steplab.train.checkpoint_files import (
    Manifest,
    NumpyRngState,
    OptimizerRecord,
    ParamGroup,
    PythonRngState,
)
from steplab.train.tensor_files import SavedTensors

MERSENNE_WORDS = 624  # of 32 bits, in the state of a Mersenne Twister
LISTED = 5  # names in one error message
# How the update is computed, not what it computes: a resumed training keeps its own choice.
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
NOT_SETTINGS = {"params", "param_names", *IMPLEMENTATION}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what is saved of a model; a shared tensor once, under the first of its names."""
    state = _state(model)
    return {name: state[name] for name in _saved_names(state).values()}


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name of every parameter by its `id`; a shared one has the first of its names."""
    named = sorted(model.named_parameters(remove_duplicate=False), reverse=True)
    return {id(parameter): name for name, parameter in named}


def check_weights(model: nn.Module, saved: SavedTensors, where: str) -> None:
    """Raise a UserError that lists what is missing, extra or of another shape or dtype."""
    wanted = {name: _shape(each.shape, each.dtype) for name, each in model_tensors(model).items()}
    there = {name: _shape(shape, saved.dtypes[name]) for name, shape in saved.shapes.items()}
    # 16-bit weights are fp32 on the rank that updates them: what fits on one rank is right.
    of_ranks = [json.loads(text) for text in gather_texts(json.dumps(wanted))]
    misshapen = [
        f"{name} (saved {there[name]}, model {wanted[name]})"
        for name in sorted(wanted.keys() & there.keys())
        if there[name] not in (each.get(name) for each in of_ranks)
    ]
    faults = {
        "missing": sorted(wanted.keys() - there.keys()),
        "extra": sorted(there.keys() - wanted.keys()),
        "misshapen": misshapen,
    }
    listed = "; ".join(f"{fault}: {first_few(names)}" for fault, names in faults.items() if names)
    if listed:
        raise UserError(
            f"{where} does not fit the model ({listed}).",
            "Build the model with the settings that it was trained with.",
        )


def restore_weights(model: nn.Module, saved: SavedTensors) -> None:
    """Copy checked tensors into the model, in place; a rank copies its slices."""
    state = _state(model)
    names = _saved_names(state).items()
    read = {name: saved.read_like(first, state[name].detach()) for name, first in names}
    model.load_state_dict(read, strict=True)


def first_few(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    known = list(names)
    rest = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    return ", ".join(known[:LISTED]) + rest


def _state(model: nn.Module) -> dict[str, Tensor]:
    # keep_vars: the tensors themselves, so that shared ones are recognized by their identity.
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    odd = sorted(name for name, value in state.items() if not isinstance(value, torch.Tensor))
    if odd:
        raise Unsupported(f"A checkpoint holds tensors only, but the model has {first_few(odd)}.")
    return state


def _saved_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(state[name]), name) for name in sorted(state)}


def _shape(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def capture_optimizer(
    optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[OptimizerRecord, dict[str, Tensor]]:
    """Return the plain part of an optimizer and its tensors, called `exp_avg/<parameter>`."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    held = set()
    for parameter, state in moments(optimizer):
        name = _name(parameter, names)
        held |= {name} if state else set()
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{key}/{name}"] = value
            else:
                values.setdefault(name, {})[key] = _as_json(value, key)
    groups = tuple(
        ParamGroup(tuple(_name(p, names) for p in group["params"]), _settings(group))
        for group in optimizer.param_groups
    )
    stateless = tuple(name for g in groups for name in g.parameters if name not in held)
    return OptimizerRecord(type(optimizer).__name__, groups, values, stateless), tensors


def merge_records(records: Sequence[OptimizerRecord]) -> OptimizerRecord:
    """Return the record of an optimizer from what each rank has of it.

    Ranks may have cut its groups by who updates what; those of equal settings are one again.
    """
    names: dict[str, list[str]] = {}  # by settings, as text
    settings: dict[str, Mapping[str, Any]] = {}
    values: dict[str, Mapping[str, Any]] = {}
    stateless: dict[str, None] = {}
    for record in records:
        values.update(record.values)
        stateless.update(dict.fromkeys(record.stateless))
        for group in record.groups:
            key = json.dumps(group.settings, sort_keys=True)
            settings[key] = group.settings
            known = names.setdefault(key, [])
            known += [name for name in group.parameters if name not in known]
    groups = tuple(ParamGroup(tuple(found), settings[key]) for key, found in names.items())
    return OptimizerRecord(records[0].kind, groups, values, tuple(stateless))


def check_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    record: OptimizerRecord,
    saved: SavedTensors,
    where: str,
) -> None:
    """Raise a UserError unless the saved state belongs to this kind and these parameters."""
    kind = type(optimizer).__name__
    if record.kind != kind:
        raise UserError(
            f"{where} holds the state of {record.kind}, but this training uses {kind}.",
            f"Train with {record.kind}, or start a new run from the weights alone.",
        )
    own = [[_name(p, names) for p in group["params"]] for group in optimizer.param_groups]
    texts = gather_texts(json.dumps(own))
    everywhere = {name for text in texts for group in json.loads(text) for name in group}
    settings = _saved_settings(record)
    strangers = sorted(everywhere.symmetric_difference(settings))
    if strangers:
        raise UserError(f"{where} was saved with other parameters: {first_few(strangers)}.")
    for group in own:
        for name in group[1:]:
            if settings[name] != settings[group[0]]:
                raise UserError(
                    f"{where} has {group[0]} and {name} in groups of different settings, but this "
                    "training has them in one."
                )
    lost = sorted(path for path in saved.shapes if path.partition("/")[2] not in settings)
    if lost:
        raise UserError(f"{where} holds state of unknown parameters: {first_few(lost)}.")
    held = {path.partition("/")[2] for path in saved.shapes} | record.values.keys()
    gone = sorted(settings.keys() - held - set(record.stateless))
    if gone:
        raise UserError(
            f"{where} is damaged: the state of {first_few(gone)} is missing.",
            "Resume from an older checkpoint, or begin anew with its weights: --from-checkpoint",
        )
    _check_moments(optimizer, names, saved, where)
    for members, current in zip(own, optimizer.param_groups, strict=True):
        for key, value in settings[members[0]].items() if members else ():
            if not _fits(current.get(key, value), value):
                raise UserError(f"{where} was saved with {key} {shorten(value, 60)}.")


def _check_moments(
    optimizer: Optimizer, names: Mapping[int, str], saved: SavedTensors, where: str
) -> None:
    """Raise a UserError unless every state of an AdamW has the shape of its parameter, or none.

    A parameter has all of its state or nothing: it is initialized at the first step, as a whole.
    Each rank looks at the parameters that it updates.
    """
    whole = state_keys(optimizer)
    if not whole:
        return
    params = (p for group in optimizer.param_groups for p in group["params"])
    shapes = {_name(p, names): tuple(p.shape) for p in params}
    keys: dict[str, set[str]] = {}
    for path, shape in saved.shapes.items():
        key, _, name = path.partition("/")
        if name not in shapes:
            continue
        keys.setdefault(name, set()).add(key)
        if shape not in (shapes[name], ()) or not saved.dtypes[path].is_floating_point:
            raise UserError(
                f"{where} does not fit the model: {key} of {name} is "
                f"{_shape(shape, saved.dtypes[path])}, and the parameter has {list(shapes[name])}."
            )
    broken = sorted(name for name, found in keys.items() if not whole <= found)
    if broken:
        raise UserError(f"{where} is damaged: the state of {first_few(broken)} is not whole.")


def _fits(current: Any, saved: Any) -> bool:
    """Whether a saved setting can take the place of the current one."""
    if isinstance(current, (tuple, list)):
        return (
            isinstance(saved, list)
            and len(saved) == len(current)
            and all(map(_fits, current, saved))
        )
    if isinstance(current, bool) or current is None or isinstance(current, str):
        return type(saved) is type(current)
    return isinstance(saved, (int, float)) and not isinstance(saved, bool) and isfinite(saved)


def restore_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    record: OptimizerRecord,
    saved: SavedTensors,
) -> None:
    """Replace the optimizer's state and settings with the saved ones, which have been checked."""
    tensors: dict[str, list[str]] = {}  # keys of the state, by parameter
    for path in saved.shapes:
        key, _, name = path.partition("/")
        tensors.setdefault(name, []).append(key)
    settings = _saved_settings(record)
    clear_moments(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _name(parameter, names)
            state: dict[str, Any] = dict(record.values.get(name, {}))
            for key in tensors.get(name, ()):
                state[key] = _placed(saved, key, name, parameter, group)
            if state:
                optimizer.state[parameter] |= packed_state(optimizer, parameter, state)
        if group["params"]:
            for key, value in settings[_name(group["params"][0], names)].items():
                group[key] = _restored(group.get(key), value)


def _saved_settings(record: OptimizerRecord) -> dict[str, Mapping[str, Any]]:
    return {name: group.settings for group in record.groups for name in group.parameters}


def _placed(
    saved: SavedTensors, key: str, name: str, parameter: Tensor, group: Mapping[str, Any]
) -> Tensor:
    """Read a tensor, bit for bit, to the device on which torch's optimizers expect it."""
    path = f"{key}/{name}"
    if key == "step":
        # Counters stay on the host unless the update reads them on the device.
        count = saved.read(path)
        if group.get("fused"):
            return count.to(parameter.device, torch.float32, copy=True)
        return count.to(parameter.device if group.get("capturable") else "cpu", copy=True)
    if saved.shapes[path] == tuple(parameter.shape):
        like = torch.empty_like(parameter, dtype=saved.dtypes[path], requires_grad=False)
        return like.copy_(saved.read_like(path, parameter.detach()))
    return saved.read(path).to(parameter.device, copy=True)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _as_json(v, k) for k, v in group.items() if k not in NOT_SETTINGS}


def _as_json(value: Any, key: str) -> Any:
    try:
        return encode(_plain(value))
    except (TypeError, RuntimeError):
        raise Unsupported(
            f"A checkpoint cannot hold the optimizer's {key}, a {type(value).__name__}."
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()  # exact: a float of 64 bits holds every shorter one
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _restored(current: Any, saved: Any) -> Any:
    """Return the saved setting in the form of the current one."""
    if isinstance(current, Tensor):
        return current.fill_(saved)  # the same tensor: a compiled update holds on to it
    if isinstance(current, tuple):
        return tuple(_restored(c, s) for c, s in zip(current, saved, strict=True))
    return saved


def _name(parameter: Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise Unsupported("The optimizer updates a tensor that is not a parameter of the model.")
    return names[id(parameter)]


def torch_rng_states() -> dict[str, Tensor]:
    """Return the states (uint8, on the host) of torch's generators: `cpu`, `cuda.0`, ..."""
    states = {"cpu": torch.get_rng_state()}
    # Before CUDA is in use its generators have drawn nothing, and asking would start it.
    if torch.cuda.is_initialized():
        states |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def check_rng_states(manifest: Manifest, states: Mapping[str, Tensor], path: Path) -> None:
    """Raise a UserError unless every random state can be set; nothing is set yet.

    Each is tried on a generator of its own: numpy reads beyond its memory at a false position.
    """
    key = manifest.numpy_random.key
    try:
        torch.Generator().set_state(states["cpu"].clone())
        _python_generator(manifest.python_random)
        if len(key) != MERSENNE_WORDS or not 0 <= min(key) <= max(key) < 2**32:
            raise ValueError(f"{len(key)} words")
        if not 0 <= manifest.numpy_random.position <= MERSENNE_WORDS:
            raise ValueError(f"position {manifest.numpy_random.position}")
        if any(state.shape != (16,) for name, state in states.items() if name != "cpu"):
            raise ValueError("a CUDA state of another length")
    except (KeyError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise UserError(f"{path} is damaged: a random state cannot be set ({error}).") from None


def _python_generator(state: PythonRngState) -> random.Random:
    found = random.Random()
    found.setstate((state.version, state.words, state.gauss))
    return found


def set_torch_rng_states(states: Mapping[str, Tensor]) -> None:
    """Set torch's generators; states of GPUs that this machine does not have are ignored."""
    torch.set_rng_state(states["cpu"].clone())
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"].clone(), index)


def python_rng_state() -> PythonRngState:
    """Return the state of the module `random`."""
    version, words, gauss = random.getstate()
    return PythonRngState(version, words, gauss)


def set_python_rng_state(state: PythonRngState) -> None:
    """Set the state of the module `random`."""
    random.setstate(_python_generator(state).getstate())


def numpy_rng_state() -> NumpyRngState:
    """Return the state of numpy's global generator."""
    state: Any = np.random.get_state()
    _, key, position, has_gauss, gauss = state
    return NumpyRngState(tuple(key.tolist()), position, has_gauss, gauss)


def set_numpy_rng_state(state: NumpyRngState) -> None:
    """Set the state of numpy's global generator."""
    key = np.array(state.key, dtype=np.uint32)
    np.random.set_state(("MT19937", key, state.position, state.has_gauss, state.gauss))

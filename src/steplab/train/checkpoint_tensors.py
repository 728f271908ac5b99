"""The tensors of a checkpoint: weights, optimizer state and random generators, and their files.

Optimizer state is stored by parameter name, so that a changed order cannot mix it up.
"""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
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
from steplab.modules.optimizer import clear_moments, moments, state_keys
from steplab.train.checkpoint_files import (
    FileChecksum,
    Manifest,
    NumpyRngState,
    OptimizerRecord,
    ParamGroup,
    PythonRngState,
)

MERSENNE_WORDS = 624  # of 32 bits, in the state of a Mersenne Twister
LISTED = 5  # names in one error message
# How the update is computed, not what it computes: a resumed training keeps its own choice.
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
NOT_SETTINGS = {"params", "param_names", *IMPLEMENTATION}
# Names of dtypes in a safetensors file.
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
    listed = "; ".join(f"{fault}: {first_few(names)}" for fault, names in faults.items() if names)
    if listed:
        raise UserError(
            f"{where} does not fit the model ({listed}).",
            "Build the model with the settings that it was trained with.",
        )


def restore_weights(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy checked tensors into the model, in place."""
    names = _saved_names(_state(model))
    model.load_state_dict({name: saved[first] for name, first in names.items()}, strict=True)


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


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def capture_optimizer(
    optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[OptimizerRecord, dict[str, Tensor]]:
    """Return the plain part of an optimizer and its tensors, called `exp_avg/<parameter>`."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, state in moments(optimizer):
        name = _name(parameter, names)
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{key}/{name}"] = value
            else:
                values.setdefault(name, {})[key] = _as_json(value, key)
    groups = tuple(
        ParamGroup(tuple(_name(p, names) for p in group["params"]), _settings(group))
        for group in optimizer.param_groups
    )
    return OptimizerRecord(type(optimizer).__name__, groups, values), tensors


def check_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    record: OptimizerRecord,
    tensors: Mapping[str, Tensor],
    where: str,
) -> None:
    """Raise a UserError unless the saved state belongs to this kind and these parameters."""
    kind = type(optimizer).__name__
    if record.kind != kind:
        raise UserError(
            f"{where} holds the state of {record.kind}, but this training uses {kind}.",
            f"Train with {record.kind}, or start a new run from the weights alone.",
        )
    if len(record.groups) != len(optimizer.param_groups):
        raise UserError(
            f"{where} has {len(record.groups)} parameter groups, but this training has "
            f"{len(optimizer.param_groups)}."
        )
    for index, (saved, group) in enumerate(zip(record.groups, optimizer.param_groups, strict=True)):
        own = {_name(p, names) for p in group["params"]}
        strangers = sorted(own.symmetric_difference(saved.parameters))
        if strangers:
            raise UserError(
                f"{where} was saved with other parameters in group {index}: {first_few(strangers)}."
            )
    known = {name for group in record.groups for name in group.parameters}
    lost = sorted(name for name in tensors if name.partition("/")[2] not in known)
    if lost:
        raise UserError(f"{where} holds state of unknown parameters: {first_few(lost)}.")
    _check_moments(optimizer, names, tensors, where)
    for saved, group in zip(record.groups, optimizer.param_groups, strict=True):
        for key, value in saved.settings.items():
            if not _fits(group.get(key, value), value):
                raise UserError(f"{where} was saved with {key} {shorten(value, 60)}.")


def _check_moments(
    optimizer: Optimizer, names: Mapping[int, str], tensors: Mapping[str, Tensor], where: str
) -> None:
    """Raise a UserError unless every state of an AdamW has the shape of its parameter, or none.

    A parameter has all of its state or nothing: it is initialized at the first step, as a whole.
    """
    whole = state_keys(optimizer)
    if not whole:
        return
    shapes = {_name(p, names): p.shape for group in optimizer.param_groups for p in group["params"]}
    keys: dict[str, set[str]] = {}
    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        keys.setdefault(name, set()).add(key)
        if tensor.shape not in (shapes[name], ()) or not tensor.is_floating_point():
            raise UserError(
                f"{where} does not fit the model: {key} of {name} is {_shape(tensor)}, "
                f"and the parameter has {list(shapes[name])}."
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
    tensors: Mapping[str, Tensor],
) -> None:
    """Replace the optimizer's state and settings with the saved ones, which have been checked."""
    state: dict[str, dict[str, Any]] = {}
    for name, values in record.values.items():
        state.setdefault(name, {}).update(values)
    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        state.setdefault(name, {})[key] = tensor
    clear_moments(optimizer)
    for saved, group in zip(record.groups, optimizer.param_groups, strict=True):
        for key, value in saved.settings.items():
            group[key] = _restored(group.get(key), value)
        for parameter in group["params"]:
            own = state.get(_name(parameter, names), {})
            if own:
                optimizer.state[parameter] |= {
                    key: _placed(value, key, parameter, group)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in own.items()
                }


def _placed(saved: Tensor, key: str, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Copy a tensor, bit for bit, to the device on which torch's optimizers expect it."""
    if key == "step":
        # Counters stay on the host unless the update reads them on the device.
        if group.get("fused"):
            return saved.to(parameter.device, torch.float32, copy=True)
        return saved.to(parameter.device if group.get("capturable") else "cpu", copy=True)
    if saved.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False).copy_(saved)
    return saved.to(parameter.device, copy=True)


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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileChecksum:
    """Write a safetensors file and flush it to disk; return its size and checksum.

    Not by the library, for three reasons: device tensors reach the host one at a time instead of
    all at once (6.5 GB for 538 M parameters with AdamW), the checksum is taken of the bytes in
    memory, and a full disk is an OSError.
    """
    size, crc32 = 0, 0
    with path.open("xb") as file:
        for chunk in _chunks(tensors):
            file.write(chunk)
            size, crc32 = size + len(chunk), zlib.crc32(chunk, crc32)
        file.flush()
        os.fsync(file.fileno())
    return FileChecksum(size, crc32)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the host; they may share memory with it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from None


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the file's length field, header and data."""
    # Wide elements first, so that every tensor starts at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in CODES or tensor.layout != torch.strided:
            raise Unsupported(
                f"A checkpoint cannot hold {name}: {tensor.dtype}, {tensor.layout}.",
                f"It holds strided tensors of {', '.join(CODES.values())}.",
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        entry = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data

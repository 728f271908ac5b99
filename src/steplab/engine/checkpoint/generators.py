"""States of all random generators that a training step may draw from."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steplab.engine.checkpoint.document import NumpyRandom, PythonRandom


def torch_states() -> dict[str, Tensor]:
    """Return the states (uint8, on the host) of torch's generators: `cpu`, `cuda.0`, ..."""
    states = {"cpu": torch.get_rng_state()}
    # Before CUDA is in use its generators have drawn nothing, and asking would start it.
    if torch.cuda.is_initialized():
        states |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_torch_states(states: Mapping[str, Tensor]) -> None:
    """Set torch's generators; those of GPUs that this machine does not have are left out."""
    torch.set_rng_state(states["cpu"].clone())
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"].clone(), index)


def python_state() -> PythonRandom:
    """Return the state of the module `random`."""
    version, words, gauss = random.getstate()
    return PythonRandom(version, words, gauss)


def set_python_state(state: PythonRandom) -> None:
    """Set the state of the module `random`."""
    random.setstate((state.version, state.words, state.gauss))


def numpy_state() -> NumpyRandom:
    """Return the state of numpy's global generator."""
    state: Any = np.random.get_state()
    _, key, position, has_gauss, gauss = state
    return NumpyRandom(tuple(key.tolist()), position, has_gauss, gauss)


def set_numpy_state(state: NumpyRandom) -> None:
    """Set the state of numpy's global generator."""
    key = np.array(state.key, dtype=np.uint32)
    np.random.set_state(("MT19937", key, state.position, state.has_gauss, state.gauss))

"""Triton where it is installed, whether its kernels can run here, and what launches have in common.

Implementations take `triton` and `tl` from here and not from the library, so that one file can hold
its kernels beside the op that launches them and still be imported where Triton is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class _NoTriton:
    """Stands in for the library: kernels stay plain functions, which nobody launches."""

    @staticmethod
    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        return function if function is not None else lambda kernel: kernel

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value


# Looked up once, here: torch.compile cannot trace the look-up.
HAS_TRITON = importlib.util.find_spec("triton") is not None
triton: Any = importlib.import_module("triton") if HAS_TRITON else _NoTriton()
tl: Any = importlib.import_module("triton.language") if HAS_TRITON else _NoTriton()
# Gluon is experimental and changes; with these versions the kernels were compiled.
GLUON_VERSIONS = ("3.6", "3.7", "3.8")
HAS_GLUON = HAS_TRITON and triton.__version__.startswith(GLUON_VERSIONS)
_GLUON = "triton.experimental.gluon"
gluon: Any = importlib.import_module(_GLUON) if HAS_GLUON else _NoTriton()
gl: Any = importlib.import_module(f"{_GLUON}.language") if HAS_GLUON else _NoTriton()
hopper: Any = (
    importlib.import_module(f"{_GLUON}.language.nvidia.hopper") if HAS_GLUON else _NoTriton()
)
# As Triton itself reads it.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_BATCH = 65_535  # CUDA's limit for the second and third axis of a grid


def refuse_device(x: Tensor) -> str:
    """Return why Triton kernels cannot run on the device of `x`, or ""."""
    if not HAS_TRITON:
        return "needs triton, which is not installed"
    on_nvidia = x.device.type == "cuda" and torch.version.cuda is not None
    if not on_nvidia and not INTERPRETED:
        return f"needs an NVIDIA GPU, not {x.device.type}"
    if on_nvidia and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    return ""


def refuse_gluon(x: Tensor) -> str:
    """Return why Gluon kernels, which are written for Hopper, cannot run on the device of `x`."""
    if not HAS_GLUON:
        return f"needs triton {' or '.join(GLUON_VERSIONS)}, for which its kernels are written"
    if INTERPRETED or x.device.type != "cuda":
        return f"needs a GPU, not {'an interpreter' if INTERPRETED else x.device.type}"
    if torch.cuda.get_device_capability(x.device) != (9, 0):
        return "needs compute capability 9.0, for which its kernels are written"
    return ""


def refuse_dtype(*tensors: Tensor | None) -> str:
    """Return why Triton kernels cannot take one of these tensors, or ""."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"needs fp16, bf16 or fp32, not {tensor.dtype}"
    return ""


def refuse_batch(x: Tensor) -> str:
    """Return why kernels with a program for every row of the batch, `x.shape[0]`, cannot run."""
    B = x.shape[0]
    return f"needs a batch of at most {MAX_BATCH}, not {B}" if B > MAX_BATCH else ""


def use_triton(x: Tensor) -> bool:
    """Whether a part that is written both in Triton and in torch runs in Triton for `x`."""
    return HAS_TRITON and (x.is_cuda or INTERPRETED)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the device of `x` the current one, on which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def multiprocessors(x: Tensor) -> int:
    """Return the number of multiprocessors of the GPU of `x`; a CPU counts as one."""
    if not x.is_cuda:
        return 1
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def tensor_descriptor(x: Tensor, block: Sequence[int]) -> Any:
    """Return a descriptor by which the copy engine (TMA) reads blocks of `x`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, list(block))

"""Nothing is left to chance while numerics are compared: dropout is off, and noise stands still.

Two implementations never draw the same numbers, and neither do two dtypes. So torch's functions
that draw give numbers that depend on their shape alone, in any dtype and in compiled code too: the
methods that fill a tensor in place through a mode of torch functions, which Dynamo traces, where it
does not see another method put in their place. What Python and numpy draw (a layer that is skipped
now and then) is the same for all who ask as often.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

DROPOUT = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
BITS = 2**32
MULTIPLIERS = (0x45D9F3B, 0x119DE1F3)  # odd, below 2^31: products stay within 63 bits


def seed_all(seed: int) -> None:
    """Let all generators that a model or its batches may draw from begin anew."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % BITS)


@contextlib.contextmanager
def dropout_off() -> Iterator[None]:
    """Let torch's dropout functions drop nothing, also where a model calls them by itself."""
    attention = functional.scaled_dot_product_attention

    def keep(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **how: Any) -> Tensor:
        mask, *others = rest or (how.pop("attn_mask", None),)
        how.pop("dropout_p", None)
        return attention(q, k, v, mask, 0.0, *others[1:], **how)

    instead: dict[str, Callable[..., Any]] = dict.fromkeys(DROPOUT, keep)
    with _replaced(functional, {**instead, attention.__name__: attend}):
        yield


@contextlib.contextmanager
def fixed_noise(in_place: bool = True) -> Iterator[None]:
    """Let torch's functions that draw give the same numbers whenever they give the same shape.

    `in_place`: so do methods that fill a tensor. All compiled code is compiled again when that
    begins and when it ends, so a step that is measured afterwards does without. So does what fills
    no tensor: Dynamo cannot trace all of torch's own methods through a mode (`unflatten`).
    """
    with _replaced(torch, NOISE), FixedFills() if in_place else contextlib.nullcontext():
        yield


class FixedFills(TorchFunctionMode):
    """Fills tensors by FILLS."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, or what stands for it."""
        return FILLS.get(func, func)(*args, **(kwargs or {}))


def fills_at_random(run: Callable[[], object]) -> bool:
    """Whether code that is not compiled fills a tensor by a method that draws."""
    with _FillsSeen() as seen:
        run()
    return seen.any


class _FillsSeen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.any |= func in FILLS
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _replaced(module: Any, instead: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in instead}
    for name, function in instead.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _rand(*size: Any, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    u = _uniform(_size(size, how), how.get("device"))
    return _like_asked(u, dtype or torch.get_default_dtype(), how)


def _randn(*size: Any, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    n = _normal(_size(size, how), how.get("device"))
    return _like_asked(n, dtype or torch.get_default_dtype(), how)


def _rand_like(x: Tensor, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    return _like_asked(_uniform(x.shape, how.get("device") or x.device), dtype or x.dtype, how)


def _randn_like(x: Tensor, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    return _like_asked(_normal(x.shape, how.get("device") or x.device), dtype or x.dtype, how)


def _normal_around(
    mean: Tensor | float = 0.0, std: Tensor | float = 1.0, size: Any = None, **how: Any
) -> Tensor:
    """`torch.normal`: mean and spread are numbers, with a size, or tensors."""
    if size is not None:
        return _randn(size, **how) * std + mean
    like = mean if isinstance(mean, Tensor) else std
    assert isinstance(like, Tensor)
    shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
    return (_normal(shape, like.device) * std + mean).to(like.dtype)


def _bernoulli(p: Tensor, *_: Any, **__: Any) -> Tensor:
    return (_flat_uniform(p.shape, p.device) < p.flatten()).reshape(p.shape).to(p.dtype)


def _fill_normal(x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return x.copy_(_normal(x.shape, x.device) * std + mean)


def _fill_uniform(x: Tensor, low: float = 0.0, high: float = 1.0, **how: Any) -> Tensor:
    low, high = how.get("from", low), how.get("to", high)
    return x.copy_(_uniform(x.shape, x.device) * (high - low) + low)


def _fill_exponential(x: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    return x.copy_(_flat_uniform(x.shape, x.device).log().reshape(x.shape) / -lambd)


def _fill_bernoulli(x: Tensor, p: Tensor | float = 0.5, **_: Any) -> Tensor:
    return x.copy_(_bernoulli(torch.as_tensor(p, device=x.device).expand(x.shape)))


def _uniform(shape: Any, device: Any) -> Tensor:
    return _flat_uniform(shape, device).reshape(shape)


def _normal(shape: Any, device: Any) -> Tensor:
    return (torch.erfinv(2 * _flat_uniform(shape, device) - 1) * math.sqrt(2)).reshape(shape)


def _flat_uniform(shape: Any, device: Any) -> Tensor:
    """Return the numbers of a shape in one dimension, by their index.

    They get their shape last: a peer that rounds the stream (`RoundedStream`) leaves one dimension
    alone. Rounded to bf16, one in 512 would be 1, and normal noise infinite.
    """
    return hashed(torch.arange(math.prod(shape), device=device) + 1)


def hashed(integers: Tensor) -> Tensor:
    """Return a number between 0 and 1 in fp64 for each integer: a hash, exact everywhere."""
    bits = integers % BITS
    for multiplier in MULTIPLIERS:
        bits = (bits * multiplier) % BITS
        bits = bits ^ (bits >> 16)
    return (bits.double() + 0.5) / BITS


def _size(size: tuple[Any, ...], how: Mapping[str, Any]) -> Any:
    if "size" in how:
        return how["size"]
    return size[0] if len(size) == 1 and not isinstance(size[0], int) else size


def _like_asked(x: Tensor, dtype: torch.dtype, how: Mapping[str, Any]) -> Tensor:
    x = x.to(dtype)
    return x.requires_grad_() if how.get("requires_grad") else x


NOISE: Mapping[str, Callable[..., Any]] = {
    "rand": _rand,
    "randn": _randn,
    "rand_like": _rand_like,
    "randn_like": _randn_like,
    "bernoulli": _bernoulli,
    "normal": _normal_around,
}
FILLS: Mapping[Any, Callable[..., Any]] = {
    Tensor.normal_: _fill_normal,
    Tensor.uniform_: _fill_uniform,
    Tensor.exponential_: _fill_exponential,
    Tensor.bernoulli_: _fill_bernoulli,
}

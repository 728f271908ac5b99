"""One call of an operator as an estimate sees it: its class, its size and its work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from steplab.probes.formulas import VECTOR_OPS, matrix_formulas, own_formula

DTYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
ATTENTION = "_attention"
_FORMULAS = matrix_formulas(visible=True)
_REGISTRY = FlopCounterMode(display=False).flop_registry


@dataclass(frozen=True)
class Call:
    """What one call does; calls of one `kind` are compared by `size`, the logarithms of lengths."""

    kind: str  # the operator, and the dtype it computes in
    size: tuple[float, ...]
    flops: float  # 0 where memory decides
    bytes: float  # operands and results, each once
    dtype: str = "fp32"

    @property
    def work(self) -> float:
        """FLOPs of what computes, bytes of what moves."""
        return self.flops or self.bytes


def describe(func: Any, args: Any, kwargs: Any, out: Any) -> Call:
    """Return a call's class, size and work, by its arguments and results."""
    packet = func._overloadpacket
    name = packet.__name__
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    floats = [t for t in tensors if t.is_floating_point()] or results or tensors
    # Of two operands the narrower one is the product's dtype, of a copy what is read.
    dtype = DTYPES.get(floats[0].dtype, "other") if floats else "other"
    fresh = [t for t in results if not any(t is other for other in tensors)]
    moved = float(sum(map(_bytes, tensors)) + sum(map(_bytes, fresh)))
    flops = _flops(func, packet, args, kwargs, out)
    kind = f"{name} {dtype}"
    if name in PRODUCTS and flops:
        return Call(f"product {dtype}", _product_size(name, args), flops, moved, dtype)
    if ATTENTION in name and flops:
        return Call(kind, _attention_size(packet, args, kwargs), flops, moved, dtype)
    if flops:
        return Call(kind, (_log(flops), _log(moved)), flops, moved, dtype)
    return Call(kind, (_log(moved),), 0.0, moved, dtype)


def _flops(func: Any, packet: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of matrix units; 0 for what has none, or no formula."""
    if packet in VECTOR_OPS:
        return 0.0
    ours = own_formula(packet.__name__) if func.namespace == "steplab" else _FORMULAS.get(packet)
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if ours is not None:
        return float(ours(*args, out_val=first, **kwargs))
    if packet in _REGISTRY:
        return float(_REGISTRY[packet](*args, **kwargs, out_val=out))
    return 0.0


def _product_size(name: str, args: Any) -> tuple[float, ...]:
    """(batch, M, N, K); products of groups of rows have the groups as their batch."""
    a, b = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
    if name == "_grouped_mm":
        groups = b.shape[0] if b.ndim == 3 else a.shape[0] if a.ndim == 3 else args[2].numel()
        if a.ndim == b.ndim == 2:  # cut along K
            return _logs(groups, a.shape[0], b.shape[1], a.shape[1] / groups)
        return _logs(groups, a.shape[-2] / groups, b.shape[-1], a.shape[-1])
    batch = a.shape[0] if a.ndim == 3 else 1
    return _logs(batch, a.shape[-2], b.shape[-1], a.shape[-1])


def _attention_size(packet: Any, args: Any, kwargs: Any) -> tuple[float, ...]:
    """(batch x heads, queries, keys, head width, whether later keys are hidden)."""
    names = [argument.name for argument in packet.default._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    q, k = given.get("query", args[0]), given.get("key", args[1])
    causal = bool(given.get("is_causal"))
    return (*_logs(q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3]), float(causal))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes in memory, where an expanded dimension is there once."""
    spread = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(n for n, stride in spread if stride or not n) * tensor.element_size()


def _logs(*lengths: float) -> tuple[float, ...]:
    return tuple(map(_log, lengths))


def _log(length: float) -> float:
    return math.log2(max(length, 1.0))

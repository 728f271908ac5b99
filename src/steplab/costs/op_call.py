"""OpCall: a call of an operator as the profiler recorded it. Cost: what it has to do at least."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Bytes per element, by Kineto's names of element types.
ITEM_BYTES = {
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "short int": 2,
    "short": 2,
    "int": 4,
    "long int": 8,
    "long": 8,
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
TENSOR_LIST = "TensorList"
HALF_DTYPE_CODES = (5, 15)  # torch.float16 and torch.bfloat16 as recorded scalars
# The dtype of tensors in a list is not recorded, but the kernel's template arguments begin with it:
# multi_tensor_apply_kernel<.., UnaryOpFunctor<float, ..>>, CatArrayBatchedCopy<OpaqueType<2u>>.
_TEMPLATE = re.compile(r"OpaqueType<(\d+)u?>|\b(c10::BFloat16|c10::Half|double|float|long|int)\b")

Dims = tuple[int, ...]


@dataclass(frozen=True)
class TensorArg:
    """One tensor argument."""

    dims: Dims
    dtype: str  # Kineto's name: "float", "c10::BFloat16"
    strides: Dims | None = None  # None: not recorded

    @property
    def numel(self) -> int:
        """Number of elements, expanded ones included."""
        return math.prod(self.dims)

    @property
    def item(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes in memory, where an expanded dimension (stride 0) is there once."""
        if self.strides is None or len(self.strides) != len(self.dims):
            return self.numel * self.item
        spread = zip(self.dims, self.strides, strict=True)
        return math.prod(size for size, stride in spread if stride or size == 0) * self.item


@dataclass(frozen=True)
class OpCall:
    """A call as the profiler recorded it: one entry per argument in each column."""

    name: str  # "aten::mm"
    tensors: tuple[TensorArg | None, ...]  # None: not a tensor, or a list of them
    lists: tuple[tuple[Dims, ...], ...]  # sizes of each tensor in a list; () where there is none
    values: tuple[str, ...]  # "True", "0.125", "[1, 1]"; "" for tensors

    def tensor(self, index: int) -> TensorArg | None:
        """Return the tensor at a position; None if there is none."""
        return self.tensors[index] if index < len(self.tensors) else None

    def truth(self, index: int) -> bool | None:
        """Return a recorded bool; None if there is none."""
        return {"True": True, "False": False}.get(self._value(index))

    def integer(self, index: int) -> int | None:
        """Return a recorded whole number; None if there is none."""
        value = self._value(index)
        return int(value) if re.fullmatch(r"-?\d+", value) else None

    def integers(self, index: int) -> Dims | None:
        """Return a recorded list of whole numbers; None if there is none."""
        value = self._value(index)
        if not re.fullmatch(r"\[(-?\d+(, ?-?\d+)*)?\]", value):
            return None
        return tuple(json.loads(value))

    def truths(self, index: int) -> tuple[bool, ...]:
        """Return a recorded list of bools; empty if there is none."""
        return tuple(word == "True" for word in re.findall("True|False", self._value(index)))

    def _value(self, index: int) -> str:
        return self.values[index] if index < len(self.values) else ""


@dataclass(frozen=True)
class Cost:
    """What a call has to do at least."""

    flops: float  # of matrix units; 0 for work that is bounded by memory anyway
    bytes: float  # each operand read once, each result written once; nan: unknown
    dtype: str = ""  # Kineto's name of the factors' dtype; "" where nothing is multiplied
    is_matmul: bool = False  # a matrix product or convolution; False for attention


CostModel = Callable[[OpCall], Cost | None]  # None: unknown from what was recorded


def read_call(name: str, dtypes: str, shapes: str, strides: str, values: str) -> OpCall | None:
    """Read a call from the JSON texts of its columns; None where shapes were not recorded."""
    if not shapes or not dtypes:
        return None
    all_dims, all_types = json.loads(shapes), json.loads(dtypes)
    all_strides = json.loads(strides) if strides else [None] * len(all_dims)
    rows = list(zip(all_dims, all_strides, all_types, strict=False))
    return OpCall(
        name,
        tuple(_tensor(dims, stride, dtype) for dims, stride, dtype in rows),
        tuple(_sizes(dims) if dtype == TENSOR_LIST else () for dims, _, dtype in rows),
        tuple(str(value) for value in json.loads(values)) if values else (),
    )


def _tensor(dims: list[int], strides: list[int] | None, dtype: str) -> TensorArg | None:
    if dtype not in ITEM_BYTES:
        return None
    return TensorArg(tuple(dims), dtype, None if strides is None else tuple(strides))


def _sizes(dims: Sequence[Sequence[int]]) -> tuple[Dims, ...]:
    return tuple(tuple(sizes) for sizes in dims)


def total_bytes(*tensors: TensorArg | None) -> int:
    """Return the bytes of all tensors that are not None."""
    return sum(tensor.bytes for tensor in tensors if tensor)


def broadcast(*shapes: Dims) -> Dims:
    """Return the shape that shapes broadcast to."""
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(0 if 0 in sizes else max(sizes) for sizes in zip(*padded, strict=True))


def item_bytes_of_kernel(kernel: str) -> int | None:
    """Return the bytes of the first element type in a kernel's template arguments; None: none."""
    found = _TEMPLATE.search(kernel)
    if found is None:
        return None
    return int(found[1]) if found[1] else ITEM_BYTES[found[2]]

"""OpCall: a call of an operator as the profiler recorded it. Cost: what it has to do at least."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
MOST_DIMS = 64  # of a tensor in torch
MOST_ELEMENTS = 2**63  # torch counts them in 64 bits
HALF_DTYPE_CODES = (5, 15)  # torch.float16 and torch.bfloat16 as recorded scalars
# The dtype of tensors in a list is not recorded, but the kernel's template arguments begin with it:
# multi_tensor_apply_kernel<.., UnaryOpFunctor<float, ..>>, CatArrayBatchedCopy<OpaqueType<2u>>.
_TEMPLATE = re.compile(
    r"OpaqueType<(\d{1,3})u?>|\b(c10::BFloat16|c10::Half|double|float|long|int)\b"
)

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

    @property
    def numels(self) -> tuple[int, ...]:
        """The elements of each tensor."""
        return tuple(tensor.numel for tensor in self.tensors if tensor is not None)

    def truth(self, index: int) -> bool | None:
        """Return a recorded bool; None if there is none."""
        return {"True": True, "False": False}.get(self._value(index))

    def integer(self, index: int) -> int | None:
        """Return a recorded whole number of at most 18 digits; None if there is none."""
        value = self._value(index)
        return int(value) if re.fullmatch(r"-?\d{1,18}", value) else None

    def integers(self, index: int) -> Dims | None:
        """Return a recorded list of whole numbers; None if there is none."""
        value = self._value(index)
        if not re.fullmatch(r"\[(-?\d{1,18}(, ?-?\d{1,18})*)?\]", value):
            return None
        return tuple(int(number) for number in re.findall(r"-?\d+", value))

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


# What a file may hold in place of arguments is anything. Each distinct text is judged once, where
# the file is read; a call then has texts that pass, or none.


def are_sizes(text: str) -> bool:
    """Whether a JSON text lists the sizes of every argument: [8, 64], [] or a list of such."""
    tensors = _numbers(text)
    return tensors is not None and all(math.prod(dims) < MOST_ELEMENTS for dims in tensors)


def are_strides(text: str) -> bool:
    """Whether a JSON text lists the strides of every argument, in the form of sizes."""
    return _numbers(text) is not None


def are_types(text: str) -> bool:
    """Whether a JSON text lists the names of types."""
    read = _listed(text)
    return read is not None and all(isinstance(one, str) for one in read)


def are_values(text: str) -> bool:
    """Whether a JSON text lists plain values: texts, numbers, truths, nulls."""
    read = _listed(text)
    return read is not None and not any(isinstance(one, (list, dict)) for one in read)


def _numbers(text: str) -> list[list[int]] | None:
    """Return the numbers of every tensor in a list; None where there is anything else."""
    read = _listed(text)
    if read is None or not all(isinstance(one, list) for one in read):
        return None
    tensors = [t for one in read for t in (one if _is_nested(one) else [one])]
    return tensors if all(_are_numbers(t) for t in tensors) else None


def _is_nested(dims: list[Any]) -> bool:
    """Whether an argument is a list of tensors."""
    return bool(dims) and isinstance(dims[0], list)


def _are_numbers(listed: object) -> bool:
    if not isinstance(listed, list) or len(listed) > MOST_DIMS:
        return False
    return all(type(n) is int and 0 <= n < MOST_ELEMENTS for n in listed)


def _listed(text: str) -> list[Any] | None:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):  # a number of 4,300 digits, or a nest of 1,000 lists
        return None
    return read if isinstance(read, list) else None


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


def _tensor(dims: list[Any], strides: list[Any] | None, dtype: str) -> TensorArg | None:
    if dtype not in ITEM_BYTES or _is_nested(dims):
        return None
    unknown = strides is None or _is_nested(strides) or len(strides) != len(dims)
    known = None if strides is None or unknown else tuple(strides)
    return TensorArg(tuple(dims), dtype, known)


def _sizes(dims: list[Any]) -> tuple[Dims, ...]:
    return tuple(tuple(sizes) for sizes in dims) if _is_nested(dims) else ()


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

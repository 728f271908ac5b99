"""A truth in fp64 for models that refuse fp64: every operator is computed once more, wider.

A model may assert a dtype, cast to bf16 by itself, or call an operator that has no fp64. Here its
own code sees the dtypes that it expects, while beside every tensor's storage lies another one in
fp64: each operator that is dispatched, forward, backward and in the update, runs on these too, and
what the model sees is the fp64 result rounded to its dtype. Whoever asks for `.double()` gets all
of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import HigherOrderOperator, OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from steplab.core.errors import Unsupported

WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}


class Widened(TorchDispatchMode):
    """Runs every operator in fp64 beside itself; `products` is entered around each wide run."""

    def __init__(self, products: contextlib.AbstractContextManager[Any] | None = None) -> None:
        super().__init__()
        self.products = products or contextlib.nullcontext()
        # By the address of a storage: whether it still lives, and its numbers, flat, in fp64.
        self.wide: dict[int, tuple[StorageWeakRef, Tensor]] = {}

    def __enter__(self) -> Widened:
        # The fused attentions save what only their own backward can read, and have no fp64.
        self._attention = sdpa_kernel(SDPBackend.MATH)
        self._attention.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._attention.__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator as it is and in fp64; return the latter, rounded."""
        given = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator):
            raise Unsupported(f"{func} hides its operators, so it cannot be computed in fp64.")
        inputs = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        # Before the operator runs: it may write to them.
        beside = [self._widen(one, func._schema.is_mutable) for one in inputs]
        out = func(*args, **given)
        if not _computes(inputs, out):
            return out  # integers and fp64 have no other width
        for made in tree_leaves(out):
            _refuse_layout(made)
        if torch.Tag.nondeterministic_seeded in func.tags:  # random numbers are what they are
            for one in inputs if func._schema.is_mutable else ():
                self.wide.pop(_address(one), None)
            return out
        stand_ins = {id(one): wide for one, wide in zip(inputs, beside, strict=True)}
        wide_args, wide_kwargs = tree_map(lambda x: _stand_in(x, stand_ins), (args, given))
        with _default_double(), self.products:
            wide_out = _run_wide(func, wide_args, wide_kwargs)
        if func._schema.is_mutable:
            for one, wide in zip(inputs, beside, strict=True):
                if not _overlaps(one):
                    one.copy_(wide)
        return self._take(out, wide_out, {_address(one) for one in inputs})

    def _take(self, out: Any, wide: Any, own: set[int]) -> Any:
        """Store the wide results beside the narrow ones; numbers for Python are the wide ones."""
        if isinstance(out, (list, tuple)):
            taken = [self._take(a, b, own) for a, b in zip(out, wide, strict=True)]
            return type(out)(taken)
        if not isinstance(out, Tensor):
            return wide
        if out.dtype not in WIDE:
            if _address(out) not in own and out.shape == wide.shape:
                out.copy_(wide)  # choices and comparisons are those of the wide numbers
            return out
        if _address(out) not in own:  # else it shares an input's storage, and so its wide one
            self._start(out, narrow=False).copy_(wide)
            if not _overlaps(out):
                out.copy_(wide)
        return out

    def _widen(self, leaf: Tensor, is_written: bool) -> Tensor:
        """Return what stands for a tensor in the wide run; a copy where that could change it."""
        if leaf.dtype not in WIDE:
            return leaf.clone() if is_written else leaf
        _refuse_layout(leaf)
        found = self.wide.get(_address(leaf))
        if found is None or found[0].expired():
            return self._start(leaf, narrow=True)
        return _like(leaf, found[1])

    def _start(self, tensor: Tensor, narrow: bool) -> Tensor:
        """Return the wide numbers of a new storage: the narrow ones, or room for others."""
        storage = tensor.untyped_storage()
        plain = torch.float32 if tensor.is_complex() else tensor.dtype
        flat = torch.empty(0, dtype=plain, device=tensor.device).set_(storage)
        numbers = flat.double() if narrow else torch.zeros_like(flat, dtype=torch.float64)
        self.wide[storage._cdata] = StorageWeakRef(storage), numbers
        return _like(tensor, numbers)


def _stand_in(leaf: Any, tensors: Mapping[int, Tensor]) -> Any:
    """Return what an argument is in the wide run."""
    if isinstance(leaf, Tensor):
        return tensors[id(leaf)]
    return WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf


def _run_wide(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run an operator in fp64: by itself, by hand, or by its decomposition."""
    by_hand = BY_HAND.get(func._schema.name)
    if by_hand is not None:
        return by_hand(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        instead = decomposition_table.get(func)
        if instead is None or func._schema.is_mutable:
            raise Unsupported(
                f"{func._schema.name} has no fp64: {str(error).splitlines()[0]}"
            ) from None
        return instead(*args, **kwargs)


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """aten::_grouped_mm in any dtype: group g ends at row `offs[g]` of what the groups share."""
    if offs is None:
        return torch.bmm(a, b)
    ends = offs.tolist()
    spans = list(zip([0, *ends], ends, strict=False))
    if a.ndim == 2 and b.ndim == 2:  # they share the inner dimension: a product for each group
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])
    if a.ndim == 2:  # rows of a
        parts = [a[i:j] @ b[g] for g, (i, j) in enumerate(spans)]
        rest = a.new_zeros(a.shape[0] - ends[-1], b.shape[-1])
        return torch.cat([*parts, rest])
    parts = [a[g] @ b[:, i:j] for g, (i, j) in enumerate(spans)]  # columns of b
    rest = a.new_zeros(a.shape[1], b.shape[1] - ends[-1])
    return torch.cat([*parts, rest], 1)


BY_HAND: dict[str, Callable[..., Any]] = {"aten::_grouped_mm": grouped_mm}


def _computes(inputs: list[Tensor], out: Any) -> bool:
    """Whether an operator has to do with numbers that have a wider form."""
    made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    return any(one.dtype in WIDE for one in (*inputs, *made))


def _refuse_layout(leaf: Any) -> None:
    """Refuse a tensor without a storage in which every number has its place."""
    if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_quantized):
        raise Unsupported(f"A tensor of layout {leaf.layout} cannot be computed in fp64.")


@contextlib.contextmanager
def _default_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _like(tensor: Tensor, numbers: Tensor) -> Tensor:
    """Return the part of a flat wide storage that a tensor shows of its own."""
    if tensor.is_complex():
        numbers = torch.view_as_complex(numbers.view(-1, 2))
    part = numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    part = part.conj() if tensor.is_conj() else part
    return torch._neg_view(part) if tensor.is_neg() else part


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do."""
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

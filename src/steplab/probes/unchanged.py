"""What a step reads that is older than itself and that it leaves as it is.

The next step finds the same there: a frozen network, a table, a graph; or the batch, if it is
always the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from steplab.probes.op_tensors import is_plain, storage_number, tensors_of, written_tensors


class OlderTensors(TorchDispatchMode):
    """Notes what is read inside it that was not made there, and what is written.

    Parts of one storage are told apart: a batch may be a slice of all data.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._read: set[Shown] = set()
        self._new: set[int] = set()
        self._written: set[int] = set()
        self._storages: dict[int, StorageWeakRef] = {}  # keeps numbers from being used again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, then note its tensors."""
        given = dict(kwargs or {})
        out = func(*args, **given)
        read = self._plain((args, given))
        self._read |= {shown(one) for one in read if storage_number(one) not in self._new}
        older = set(map(storage_number, read))
        self._new |= set(map(storage_number, self._plain(out))) - older
        if isinstance(func, OpOverload):
            self._written |= set(map(storage_number, written_tensors(func, args, given)))
        return out

    def _plain(self, tree: Any) -> list[Tensor]:
        tensors = list(filter(is_plain, tensors_of(tree)))
        for tensor in tensors:
            self._storages.setdefault(
                storage_number(tensor), StorageWeakRef(tensor.untyped_storage())
            )
        return tensors

    @property
    def storages(self) -> set[int]:
        """The storages that were read or made."""
        return set(self._storages)

    def has_read(self, tensor: Tensor) -> bool:
        """Whether this part of this storage was read."""
        return shown(tensor) in self._read

    def left_as_it_was(self, tensor: Tensor) -> bool:
        """Whether this part of a storage was read, and nothing of the storage was written."""
        return self.has_read(tensor) and storage_number(tensor) not in self._written


Shown = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def shown(tensor: Tensor) -> Shown:
    """Return what tells a part of a storage from others."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    return storage_number(tensor), int(tensor.storage_offset()), shape, strides

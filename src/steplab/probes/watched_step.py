"""A step written down op by op, while it runs: who wrote what, who read it, and how much of it.

Every operator reads values and makes new ones. No value is read, save samples of the factors of
matrix products and of masks. What the record says of the operators is told in `dataflow`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from steplab.probes.compiled_calls import OUTSIDE, CompiledCalls, running_line
from steplab.probes.copied_rows import REDUCTIONS, SELECTS, Places, copied_rows
from steplab.probes.graph_waste import Borders
from steplab.probes.idle_buffers import Kind, kind_of
from steplab.probes.known_tensors import HeldTensors
from steplab.probes.op_tensors import (
    is_plain,
    shown_bytes,
    shown_elements,
    shows_all,
    storage_number,
    tensors_of,
    written_tensors,
)
from steplab.probes.op_traits import (
    flops,
    from_front,
    goes_to_host,
    is_random,
    is_zero,
    left_out,
    masked_scores,
    plain_arguments,
    random_state,
    share_of_large,
)
from steplab.probes.read_parts import Joined, View, joined
from steplab.probes.switches import modes_around, switches_on
from steplab.probes.unchanged import OlderTensors
from steplab.probes.untrained import CastWatch
from steplab.probes.value_graph import FILLS, WatchedOp
from steplab.probes.value_samples import (
    empty_frames,
    ignored_share,
    padded_share,
    samples,
    unmoved_share,
    untaken_input,
)
from steplab.probes.zeros import CAST, LARGE_TENSOR, PRODUCTS, Zeros

HOST_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
# The same two in the other order, each transposed or as it is, make the transposed result.
TRANSPOSED = ("aten::mm", "aten::bmm")
DISTANCES = ("aten::_euclidean_dist", "aten::_cdist_forward")
OVERWRITES = frozenset(f"aten::{name}" for name in ("copy_", "fill_", "zero_"))
PAD = "aten::constant_pad_nd"
VIEWS_IN_PLACE = frozenset(
    f"aten::{name}"
    for name in "transpose_ t_ squeeze_ unsqueeze_ swapaxes_ swapdims_ as_strided_ detach_".split()
)
CONVOLVED = "aten::convolution_backward"  # the only one whose weight's gradient is large work
MOST_OPS = 200_000
LOOKED_AT = 4  # operators, of which one is asked for the modes around it
FEW_CHOSEN = 0.2  # of a result; relative positions take half of the scores that they choose from
SMALL_TABLE = 64  # rows of which an index may make copies; larger ones are embeddings
LEAST_POOLED = 4  # rows of a product for each sum over them
LEAST_IDS = 256  # of a batch whose padding is worth a look
LEAST_DATA = 64  # bytes; less may be a rate or another number that is put into a tensor

_Ops = tuple[int, ...]  # their numbers in the order in which they ran


@dataclass
class _Value:
    """What a storage holds: a number that equal values share, and the operator that wrote it."""

    number: int
    writer: int = -1  # -1: from before the step
    constant: bool = False  # depends on no weight, no batch and no random number
    unchanged: bool = False  # depends on nothing that the step before did not leave as it was
    zero: bool = False  # something was multiplied by the number zero
    of_weights: bool = False  # trained weights, element by element, or a sum of them
    outside: bool = False  # the storage is older than the step
    copied: Places = ()


@dataclass(frozen=True)
class _Around:
    """What was seen right before and after an operator ran."""

    random: object  # where the generators stood; None: it draws nothing
    zeros: str
    unmoved: float
    untaken: Tensor | None  # of a torch.where


@dataclass
class _Read:
    """What was read of a result: the elements of all views of it that differ."""

    elements: int  # of the whole
    views: set[View] = field(default_factory=set)
    seen: int = 0
    indexed: int = 0  # elements that an index takes, where these are few
    readers: set[int] = field(default_factory=set)  # operators


def _picks_by_row(name: str, args: Any) -> bool:
    """Whether each of many rows gives one of fewer columns: none of these is needless as a whole.

    The value of the action that was taken, of all actions. Weights would be picked for every row.
    """
    if name != "aten::gather":
        return False
    source, dim = args[0], args[1]
    columns = source.shape[dim] if source.dim() else 1
    return source.numel() > columns * columns


@dataclass
class _Seen:
    """The operators so far, and what the batch looks like."""

    ops: list[WatchedOp] = field(default_factory=list)
    padding: float = 0.0
    ignored: float = 0.0
    fresh: bool = False  # something that the step before did not read


class WatchedStep(TorchDispatchMode):
    """Notes every operator of what runs inside."""

    supports_higher_order_operators = True

    def __init__(
        self, held: HeldTensors, calls: CompiledCalls, before: OlderTensors, batches: Any
    ) -> None:
        super().__init__()
        self.held = held
        given = {storage_number(tensor) for tensor in tensors_of(batches) if is_plain(tensor)}
        self.changing = held.trained | given
        self.calls = calls
        self.before = before  # the step before this one
        self.borders = Borders()
        self.by_sequence: dict[int, int] = {}  # operators of forward by autograd's number
        self.values: dict[int, _Value] = {}
        self.sparse = WeakTensorKeyDictionary()  # the values of tensors without one storage
        self.storages: dict[int, StorageWeakRef] = {}  # keeps their numbers from being used again
        self.gradients: dict[int, set[int]] = {}  # those from before that operators write
        self.seen = _Seen(fresh=bool(given))
        self.zeros = Zeros(self._value, self.seen.ops, held.weights)
        self.casts = CastWatch(held.frozen)
        self.switches: set[str] = set()
        self.cast_from: dict[int, torch.dtype] = {}  # what a cast, by its number, was given
        self.copied_from: dict[int, int] = {}  # storages, by the operators that copy them
        self.read: dict[int, dict[int, _Read]] = {}  # by writer and storage
        self.joined: dict[int, Joined] = {}  # by operator
        # Of products, lookups and 1 x 1 convolutions: the dimension of the columns, and how many.
        self.linear: dict[int, tuple[int, int]] = {}
        self.older: dict[int, Kind] = {}  # storages from before the step
        self.pooled: set[int] = set()  # those that something sums over the rows
        self.tables: dict[int, int] = {}  # weights of embeddings: elements by storage
        self.multiplied: set[int] = set()  # storages of factors of products

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, then note what it read and wrote."""
        given = dict(kwargs or {})
        self.switches.update(switches_on())  # a part of the step may switch them on
        if len(self.seen.ops) % LOOKED_AT == 0:
            self.switches.update(modes_around(self))
        random = random_state(func, args) if is_random(func, args, given) else None
        zeros = self.zeros.letter(func, args) or masked_scores(func, args, given)
        updated = samples(self._updated(func, args, given))
        untaken = untaken_input(func, args) if isinstance(func, OpOverload) else None
        out = func(*args, **given)
        if len(self.seen.ops) < MOST_OPS:
            if isinstance(func, OpOverload):
                around = _Around(random, zeros, unmoved_share(updated), untaken)
                self._note(func, args, given, out, around)
            elif isinstance(func, HigherOrderOperator):
                self._note_opaque(func.name(), tensors_of((args, given)), tensors_of(out))
        return out

    def _updated(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the large tensors, older than the step, that an operator updates whole."""
        if not isinstance(func, OpOverload) or not func._schema.name.endswith("_"):
            return []
        if torch.Tag.pointwise not in func.tags and "_foreach_" not in func._schema.name:
            return []
        return [
            tensor
            for tensor in written_tensors(func, args, kwargs)
            if is_plain(tensor) and tensor.numel() >= LARGE_TENSOR and shows_all(tensor)
            if self._value(tensor).outside
        ]

    def _note(self, func: OpOverload, args: Any, kwargs: Any, out: Any, around: _Around) -> None:
        name, random = func._schema.name, around.random
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(out)
        written = written_tensors(func, args, kwargs)
        if any(not is_plain(tensor) for tensor in (*inputs, *outputs)):
            self._note_opaque(name, inputs, outputs, random is None and not written)
            return
        self._look_at_numbers(name, args)
        read = {storage_number(tensor) for tensor in inputs}
        made = [tensor for tensor in outputs if storage_number(tensor) not in read]
        to_host = name in HOST_READS or goes_to_host(inputs, made)
        if (not made and not written and not to_host) or name in VIEWS_IN_PLACE:
            return  # a view
        call, forward = self._compiled_place()
        sources = self._note_inputs(name, args, inputs, made, call)
        fresh = name in OVERWRITES and shows_all(args[0])
        sources, index = sources[fresh:], len(self.seen.ops)
        asked = name, plain_arguments(from_front(func, args), kwargs), random
        number = hash((*asked, *map(self._key, inputs[fresh:])))
        constant = random is None and all(value.constant for value in sources)
        as_before = [self._is_unchanged(tensor) for tensor in inputs[fresh:]]
        unchanged = random is None and all(as_before)
        needs, not_zero, taken = self._makers(sources, around.untaken)
        op = WatchedOp(
            name,
            needs,
            not_zero,
            taken,
            backward=torch._C._current_graph_task_id(),
            lasts=self._lasts(index, written),
            read_by_host=to_host,
            number=number,
            mirrored=self._mirrored(asked, inputs),
            # Without an input there is nothing to keep but a table of numbers; see constants.
            may_repeat=bool(sources) and name not in FILLS,
            constant=constant,
            unchanged=unchanged,
            zeros=around.zeros,
            unmoved=around.unmoved * share_of_large(written),
            casts_back=self._casts_back(name, sources, outputs),
            elementwise=torch.Tag.pointwise in func.tags,
            of_weights=not written and self._is_of_weights(func, inputs),
            one_number=all(tensor.numel() == 1 for tensor in made),
            covers_older=fresh and self._copies_over(inputs),
            input_gradient=left_out(func, args, out),
            weight_gradient=left_out(func, args, out, 1) if name == CONVOLVED else None,
        )
        if random is None:
            op.copied = self._copied_rows(func, args, inputs, [*made, *written])
        if call != OUTSIDE:
            op.call, op.forward, op.line = call, forward, self._line(forward)
            op.flops = flops(func, args, kwargs, out)
            op.bytes = sum(map(shown_bytes, (*inputs, *made)))
        self._add(op)
        self._note_kind(name, args, inputs, outputs)
        zero = is_zero(name, args, [value.zero for value in sources])
        value = _Value(number, index, constant, unchanged, zero, op.of_weights, copied=op.copied)
        self._note_results(value, [*made, *written])

    def _note_inputs(
        self, name: str, args: Any, inputs: list[Tensor], made: list[Tensor], call: int
    ) -> list[_Value]:
        """Note that an operator reads its inputs, and how much of them; return their values."""
        sources = [self._value(tensor) for tensor in inputs]
        picks = name in SELECTS and made and not _picks_by_row(name, args)
        for place, (tensor, value) in enumerate(zip(inputs, sources, strict=True)):
            chosen = made[0].numel() if picks and not place else None
            self._note_read(tensor, value.writer, chosen)
            self._note_border(tensor, value.writer, call)
        return sources

    def _is_of_weights(self, func: OpOverload, inputs: list[Tensor]) -> bool:
        """Whether a forward works on trained weights alone, on each element or to add them up."""
        if torch._C._current_graph_task_id() >= 0 or not torch.is_grad_enabled():
            return False
        if torch.Tag.pointwise not in func.tags and func._schema.name not in REDUCTIONS:
            return False
        return bool(inputs) and all(
            self._value(tensor).of_weights or storage_number(tensor) in self.held.trained
            for tensor in inputs
        )

    def _makers(self, sources: list[_Value], untaken: Tensor | None) -> tuple[_Ops, _Ops, _Ops]:
        """Return who made what an operator reads, without zeros, and without what is not taken."""
        left_alone = self._value(untaken) if untaken is not None else None
        makers = [value for value in sources if value.writer >= 0]
        return (
            tuple({value.writer for value in makers}),
            tuple({value.writer for value in makers if not value.zero}),
            tuple({value.writer for value in makers if value is not left_alone}),
        )

    def _note_results(self, value: _Value, results: list[Tensor]) -> None:
        """Note what an operator writes; rows that are copies are known of the first result."""
        for place, tensor in enumerate(results):
            copied = () if place else value.copied
            numbered = replace(value, number=hash((value.number, place)), copied=copied)
            self._note_write(tensor, numbered)

    def _add(self, op: WatchedOp) -> None:
        for needed in op.needs:
            self.seen.ops[needed].readers += 1
        self.seen.ops.append(op)

    def _note_kind(self, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Note what the last operator is, if later ones may ask: linear, a sum, a cast, a copy."""
        index = len(self.seen.ops) - 1
        if name in ("aten::addmm", "aten::mm", "aten::embedding"):
            self.linear[index] = -1, outputs[0].shape[-1]
        if name == "aten::convolution" and math.prod(args[1].shape[2:]) == 1:
            self.linear[index] = 1, outputs[0].shape[1]
        if (pooled := self._pooled(name, args)) is not None:
            self.pooled.add(pooled)
        if outputs and (join := joined(name, args, outputs[0], lambda t: self._value(t).writer)):
            self.joined[index] = join
        compiled = self.seen.ops[index].call != OUTSIDE
        self.casts.look(inputs, outputs[0] if name == CAST else None, compiled)
        if name == CAST:
            self.cast_from[index] = inputs[0].dtype
        if name in (CAST, "aten::clone"):
            self.copied_from[index] = storage_number(inputs[0])

    def _copied_rows(
        self, func: OpOverload, args: Any, inputs: list[Tensor], results: list[Tensor]
    ) -> Places:
        """Return which rows of the first result are copies.

        A gradient's are left to the forward; rows of a weight, or of data, that an index takes are
        an embedding, unless there are few of them.
        """
        if not results or not shows_all(results[0]):
            return ()
        if torch._C._current_autograd_node() is not None:
            return ()
        older = func._schema.name in SELECTS and self._value(inputs[0]).writer < 0
        if older and len(inputs[0]) > SMALL_TABLE:
            return ()
        return copied_rows(func, args, inputs, results[0], self, len(self.seen.ops))

    def places(self, tensor: Tensor) -> Places:
        """Return the rows of a storage that are copies."""
        return self._value(tensor).copied

    def number(self, tensor: Tensor) -> int:
        """Return a number that only equal values share."""
        return hash(self._key(tensor))

    def _note_write(self, tensor: Tensor, value: _Value) -> None:
        old, storage = self.values.get(storage_number(tensor)), storage_number(tensor)
        if old is not None:
            value.outside = old.outside
            if not shows_all(tensor):
                self._lose_sight(old.writer, storage)
        self._set(tensor, value)
        # Its own elements: a storage may be larger than what is in it.
        self.read.setdefault(value.writer, {})[storage] = _Read(tensor.numel())

    def _note_read(self, tensor: Tensor, writer: int, chosen: int | None = None) -> None:
        """Note who reads a result. `chosen`: the elements that an index takes of it."""
        one = self.read.get(writer, {}).get(storage_number(tensor))
        view = int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        if one is not None:
            one.readers.add(len(self.seen.ops))
        if one is not None and chosen is not None and chosen <= FEW_CHOSEN * one.elements:
            one.indexed += chosen
        elif one is not None and view not in one.views:
            one.views.add(view)
            one.seen += shown_elements(tensor)

    def _compiled_place(self) -> tuple[int, int | None]:
        """Return the call of compiled code that runs, and in backward the forward's operator."""
        if not self.calls.followed:
            return OUTSIDE, None
        node = torch._C._current_autograd_node()
        if node is not None and self.calls.current == OUTSIDE:
            forward = self.by_sequence.get(node._sequence_nr())
            return (OUTSIDE if forward is None else self.seen.ops[forward].call), forward
        # The node of an operator has its number before the operator runs.
        number = torch._C._autograd._get_sequence_nr() - 1
        self.by_sequence.setdefault(number, len(self.seen.ops))
        return self.calls.current, None

    def _line(self, forward: int | None) -> str:
        return self.seen.ops[forward].line if forward is not None else running_line(sys._getframe())

    def _note_border(self, tensor: Tensor, writer: int, call: int) -> None:
        made_in = self.seen.ops[writer].call if writer >= 0 else OUTSIDE
        if made_in != call:
            if call != OUTSIDE:
                self.borders.entered[storage_number(tensor)] = shown_bytes(tensor)
            if made_in != OUTSIDE:
                self.borders.read.add(storage_number(tensor))

    def _lose_sight(self, writer: int, storage: int) -> None:
        """Take a result for read: a part of it is written over, and the rest has a new writer."""
        one = self.read.get(writer, {}).get(storage)
        if one is not None:
            one.seen = one.elements

    def _copies_over(self, inputs: list[Tensor]) -> bool:
        """Whether a copy puts a new tensor of the same dtype over one that is older."""
        target, *source = inputs
        return (
            len(source) == 1
            and source[0].dtype == target.dtype
            and self._value(target).outside
            and not self._value(source[0]).outside
        )

    def _note_opaque(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], settled: bool = False
    ) -> None:
        """Note an operator whose values cannot be followed: sparse ones, or of a higher order.

        `settled`: what it makes depends on its inputs alone.
        """
        index, settled = len(self.seen.ops), settled and bool(inputs)
        constant = settled and all(self._any_value(tensor).constant for tensor in inputs)
        unchanged = settled and all(map(self._is_unchanged, inputs))
        values = [self._value(tensor) for tensor in inputs if is_plain(tensor)]
        for tensor, value in zip(filter(is_plain, inputs), values, strict=True):
            self._note_read(tensor, value.writer)
        needs = tuple({value.writer for value in values if value.writer >= 0})
        self.seen.ops.append(
            WatchedOp(name, needs, needs, needs, True, constant=constant, unchanged=unchanged)
        )
        self.casts.look(list(filter(is_plain, inputs)), None, compiled=False)
        for place, tensor in enumerate(outputs):
            value = _Value(hash((index, place, "opaque")), index, constant, unchanged)
            if is_plain(tensor):
                old = self.values.get(storage_number(tensor))  # a sparse update writes to a weight
                self._set(tensor, replace(value, outside=old is not None and old.outside))
            else:
                self.sparse[tensor] = value

    def _set(self, tensor: Tensor, value: _Value) -> None:
        storage = tensor.untyped_storage()
        self.values[storage._cdata] = value
        self.storages[storage._cdata] = StorageWeakRef(storage)

    def _value(self, tensor: Tensor) -> _Value:
        key = storage_number(tensor)
        if key not in self.values:
            buffer = key in self.held.buffers
            self.older[key] = kind_of(tensor)
            self._set(tensor, _Value(hash(("outside", key)), constant=buffer, outside=True))
        return self.values[key]

    def _any_value(self, tensor: Tensor) -> _Value:
        """Return the value of a tensor, or what is known of a sparse one: nothing of older ones."""
        if is_plain(tensor):
            return self._value(tensor)
        return self.sparse.get(tensor) or _Value(hash(("outside", id(tensor))), outside=True)

    def _is_unchanged(self, tensor: Tensor) -> bool:
        """Whether the step before this one would find the same in a tensor."""
        value = self._any_value(tensor)
        if not is_plain(tensor):
            return value.unchanged or value.constant
        if value.writer >= 0 or value.constant:
            return value.unchanged or value.constant
        if not self.before.has_read(tensor):
            self.seen.fresh |= shown_bytes(tensor) >= LEAST_DATA
        changes = storage_number(tensor) in self.changing
        return self.before.left_as_it_was(tensor) and not changes

    def _key(self, tensor: Tensor) -> object:
        """Return what identifies the part of a value that a tensor shows."""
        place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        return self._value(tensor).number, place

    def _mirrored(self, asked: tuple[str, str, object], inputs: list[Tensor]) -> int | None:
        """Return the number of the product that makes the transpose of this one's result."""
        if asked[0] not in (*TRANSPOSED, *DISTANCES) or len(inputs) != 2:
            return None
        left, right = inputs
        if asked[0] in TRANSPOSED:
            left, right = left.mT, right.mT
        return hash((*asked, self._key(right), self._key(left)))

    def _lasts(self, index: int, written: list[Tensor]) -> bool:
        """Whether what an operator writes is for later steps; gradients may be dropped yet."""
        lasting = {storage_number(tensor) for tensor in written if self._outlives(tensor)}
        if lasting and lasting <= self.held.gradients:
            self.gradients[index] = lasting
        return bool(lasting)

    def _outlives(self, tensor: Tensor) -> bool:
        """Whether what is written here is for later steps; a gradient that nobody uses is not."""
        if not self._value(tensor).outside:
            return False
        return storage_number(tensor) not in self.held.idle_gradients

    def _pooled(self, name: str, args: Any) -> int | None:
        """Return the product or lookup whose rows an operator sums, four or more to each result."""
        if name not in ("aten::mean", "aten::sum") or len(args) < 2 or not args[1]:
            return None
        if args[0].dim() < 2:
            return None
        source, dims = args[0], {dim % max(args[0].dim(), 1) for dim in args[1]}
        writer = self._value(source).writer
        place, columns = self.linear.get(writer, (-1, 0))  # the last, or the channels of an image
        if source.shape[place] != columns or place % source.dim() in dims:
            return None
        rows = math.prod(source.shape[dim] for dim in dims)
        return writer if rows >= LEAST_POOLED else None

    def _origin(self, tensor: Tensor) -> int:
        """Return the storage that a tensor shows, or that it was copied from as it is."""
        storage, writer = storage_number(tensor), self._value(tensor).writer
        while writer in self.copied_from:
            storage = self.copied_from[writer]
            # What was written over since is no copy of it any more.
            writer = earlier if (earlier := self.values[storage].writer) < writer else -1
        return storage

    def _casts_back(self, name: str, sources: list[_Value], outputs: list[Tensor]) -> bool:
        """Whether a cast undoes the one that made its input."""
        if name != CAST or not sources or not outputs:
            return False
        return self.cast_from.get(sources[0].writer) == outputs[0].dtype

    def _pads(self, args: Any) -> bool:
        """Whether the step has put zeros around what it gives to an operator: a border."""
        writers = (self._value(tensor).writer for tensor in tensors_of(args))
        return any(self.seen.ops[writer].name == PAD for writer in writers if writer >= 0)

    def _look_at_numbers(self, name: str, args: Any) -> None:
        """Note tables and who multiplies them; look at ids that no model keeps, and at labels."""
        self.seen.ignored = max(self.seen.ignored, ignored_share(name, args))
        if not self._pads(args):
            self.seen.padding = max(self.seen.padding, empty_frames(name, args))
        if name in PRODUCTS:
            self.multiplied |= {self._origin(tensor) for tensor in tensors_of(args)}
        if name != "aten::embedding":
            return
        self.tables[storage_number(args[0])] = args[0].numel()
        if self._value(args[1]).constant:
            return
        if args[1].dim() == 2 and args[1].numel() >= LEAST_IDS:
            self.seen.padding = max(self.seen.padding, padded_share(args[1]))

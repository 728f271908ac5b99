"""Head and loss in chunks for steps that are not compiled: logits that wait until they are needed.

Without a compiler there is no graph to change. So the linear layer of a head returns a tensor
without data, which remembers what it is of and what is done to its rows. Where that ends in
`F.cross_entropy`, the calls become a small graph, in which the rewrite of `loss.py` looks, proves
and replaces as it does in a compiler's. Whoever looks at the logits in another way, at any time
before the loss is returned, gets them computed, with their gradients.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from steplab.core.errors import Unsupported
from steplab.core.run import Substitution
from steplab.substitute.backend import SubstitutingBackend, substitute
from steplab.substitute.loss import CASTS, RESHAPES, SWAPS

ROW_FUNCTIONS = {*CASTS, *RESHAPES, *SWAPS, "__getitem__"} - {"clone"}
# What can be said of a tensor without its data: methods, and attributes.
METHODS = {"size", "dim", "numel", "stride", "is_floating_point", "__len__"}
ATTRIBUTES = {"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_leaf", "grad_fn"}
IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
AMPLIFIED = 4  # outputs over inputs: a narrower layer is no head whose logits would be worth it
CROSS_ENTROPY = inspect.signature(F.cross_entropy)


class Call(NamedTuple):
    """Something that was done to logits, which are its first argument."""

    function: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self, logits: Tensor) -> Tensor:
        """Do the same to other logits."""
        after: Tensor = self.function(logits, *self.arguments, **self.options)
        return after


@dataclass
class Head:
    """One call of a linear layer."""

    owner: LazyHeads
    inputs: tuple[Tensor, ...]  # x, weight and, where there is one, bias
    autocast: tuple[bool, torch.dtype]
    versions: tuple[int, ...]
    is_open: bool = True  # until the loss has been returned
    found: list[Substitution] = field(default_factory=list)  # in the way to its loss
    logits: weakref.ref[LazyLogits] | None = None

    @property
    def weight(self) -> Tensor:
        """What tells one head from another."""
        return self.inputs[1]

    @property
    def is_untouched(self) -> bool:
        """Whether the inputs are what they were."""
        return self.versions == tuple(tensor._version for tensor in self.inputs)

    def settle(self, words: Any) -> None:
        """Compute the logits now, if one of the tensors that will be changed is an input."""
        logits = self.logits() if self.logits is not None else None
        own = {tensor.untyped_storage().data_ptr() for tensor in self.inputs}
        try:
            changed = {t.untyped_storage().data_ptr() for t in _tensors(words) if t is not logits}
        except NotImplementedError:  # a wrapper of torch.func, or other logits: nobody knows
            changed = own
        if logits is not None and changed & own:
            logits.computed()

    def compute(self, *inputs: Tensor) -> Tensor:
        """Return the logits of inputs."""
        is_on, dtype = self.autocast
        with torch.autocast(self.weight.device.type, dtype, enabled=is_on):
            return F.linear(*inputs)


class _Deferred(torch.autograd.Function):
    """Gives logits without data their place in autograd: their gradient is computed when asked for.

    It is needed only by those who do not go through torch's functions, such as an
    autograd.Function of the model's own.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], make: Any, *inputs: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        made: Tensor = make()
        return made

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Any, ...]:
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        with torch.enable_grad():
            logits = ctx.compute(*leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(logits, wanted, d_logits.to(logits.dtype)))
        return None, None, *(next(found) if leaf.requires_grad else None for leaf in leaves)


class LazyLogits(Tensor):
    """Logits without data: what `calls` made of a head's output, the last of them of `source`."""

    head: Head
    calls: tuple[Call, ...]
    source: LazyLogits | None
    value: Tensor | None

    @classmethod
    def of(
        cls,
        head: Head,
        like: Tensor,
        calls: tuple[Call, ...] = (),
        source: LazyLogits | None = None,
    ) -> LazyLogits:
        """Make logits in the shape and dtype of `like`, a tensor without data."""

        def make() -> LazyLogits:
            made: LazyLogits = Tensor._make_wrapper_subclass(
                cls, like.shape, like.stride(), dtype=like.dtype, device=head.weight.device
            )
            made.head, made.calls, made.source, made.value = head, calls, source, None
            return made

        def compute(*inputs: Tensor) -> Tensor:
            logits = head.compute(*inputs)
            for call in calls:
                logits = call(logits)
            return logits

        made: LazyLogits = _Deferred.apply(compute, make, *head.inputs)
        return made

    def computed(self) -> Tensor:
        """Compute them once; from then on they are like any others."""
        if self.value is None:
            self.head.owner.ordinary.add(id(self.head.weight))
            self.head.found[:] = [_used_elsewhere(one) for one in self.head.found]
            # With gradients, also inside a function that has switched them off: it is kept.
            with torch.enable_grad():
                if self.source is not None:  # of its value, which shares a change in place
                    self.value = self.calls[-1](self.source.computed())
                else:
                    _refuse_late(self.head)
                    self.value = self.head.compute(*self.head.inputs)
        return self.value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Put off what chooses rows, replace the loss, compute for all others."""
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if (
            name in METHODS
            or getattr(getattr(func, "__self__", None), "__name__", "") in ATTRIBUTES
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and first.value is None:
            others = tree_leaves((args[1:], options))
            if func is F.cross_entropy and not any(isinstance(t, LazyLogits) for t in others):
                return first.head.owner.loss(first, args[1:], options)
            if name in ROW_FUNCTIONS and not any(isinstance(one, Tensor) for one in others):
                call = Call(func, args[1:], options)
                like = torch.empty_strided(
                    first.shape, first.stride(), dtype=first.dtype, device="meta"
                )
                with contextlib.suppress(RuntimeError, NotImplementedError):  # on another device
                    return cls.of(first.head, call(like), (*first.calls, call), first)
        return func(*tree_map(_computed, args), **tree_map(_computed, options))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute for code that torch's functions do not see; autograd has its place above."""
        if func._schema.is_mutable:
            raise Unsupported(
                f"{func} changes logits in place that substitute=loss has not computed.",
                "Leave substitute=loss out of the recipe.",
            )

        def data(leaf: Any) -> Any:
            return leaf.data_alone() if isinstance(leaf, LazyLogits) else leaf

        return func(*tree_map(data, args), **tree_map(data, dict(kwargs or {})))

    def data_alone(self) -> Tensor:
        """Return the values without gradients, and keep nothing: autograd is not watching."""
        self.head.owner.ordinary.add(id(self.head.weight))
        if self.value is not None:
            return self.value.detach()
        _refuse_late(self.head)
        logits = self.head.compute(*(tensor.detach() for tensor in self.head.inputs))
        for call in self.calls:
            logits = call(logits)
        return logits


def _used_elsewhere(one: Substitution) -> Substitution:
    if one.reason:
        return one
    return Substitution(one.rewrite, one.place, reason="its logits are used elsewhere")


def _refuse_late(head: Head) -> None:
    """Refuse to compute logits that would not be what they were."""
    if head.is_open and head.is_untouched:
        return
    when = "after the loss was returned" if head.is_untouched else "after a change in place"
    raise Unsupported(
        f"Logits that substitute=loss has not computed are looked at {when}.",
        "Look at them inside the loss, or leave substitute=loss out of the recipe.",
    )


def _computed(leaf: Any) -> Any:
    return leaf.computed() if isinstance(leaf, LazyLogits) else leaf


class LazyHeads(TorchFunctionMode):
    """While it is entered, layers that are wide enough for a head return LazyLogits.

    A layer whose output was computed after all is an ordinary one, and not put off again.
    """

    def __init__(self, backend: SubstitutingBackend) -> None:
        super().__init__()
        self.backend = backend  # which tells the Run what was found
        self.ordinary: set[int] = set()  # ids of weights
        # By all that a way to a loss depends on: it with the loss replaced, and what was found.
        self.ways: dict[Any, tuple[GraphModule, list[Substitution]]] = {}
        self.heads: list[Head] = []

    def __exit__(self, *error: Any) -> None:
        """The loss has been returned, and weights may change from now on."""
        for head in self.heads:
            head.is_open = False
        self.heads = []
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Put off the layers that may be heads; do it before their inputs are changed in place."""
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self.heads and (name in IN_PLACE or (name.endswith("_") and name[-2:] != "__")):
            for head in self.heads:
                head.settle(args)
        if func is F.linear and not options and self._may_be_head(*args):
            return self._put_off(tuple(tensor for tensor in args if tensor is not None))
        return func(*args, **options)

    def _may_be_head(self, x: Any, weight: Any, *bias: Any) -> bool:
        # Parameters alone: they live on, so that an id stands for one of them.
        if not isinstance(weight, nn.Parameter) or id(weight) in self.ordinary:
            return False
        is_plain = type(x) is Tensor and weight.ndim == 2 and x.ndim > 1
        is_wide = is_plain and weight.shape[0] >= AMPLIFIED * weight.shape[1]
        if not is_wide or not torch.is_grad_enabled() or not weight.requires_grad:
            return False
        is_mapped = torch._C._functorch.maybe_current_level() is not None  # by torch.func
        # As by a checkpoint, which counts what is saved and would count less.
        is_watched = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        return not is_mapped and not is_watched

    def _put_off(self, inputs: tuple[Tensor, ...]) -> LazyLogits:
        x, weight = inputs[:2]
        is_on, narrow = _autocast(x)
        head = Head(self, inputs, (is_on, narrow), tuple(t._version for t in inputs))
        self.heads.append(head)
        dtype = narrow if is_on and x.dtype != torch.float64 else x.dtype
        shape = (*x.shape[:-1], weight.shape[0])
        logits = LazyLogits.of(head, torch.empty(shape, dtype=dtype, device="meta"))
        head.logits = weakref.ref(logits)
        return logits

    def loss(self, logits: LazyLogits, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        """Return the cross-entropy of logits that nobody has computed, in chunks where proved."""
        head = logits.head
        if head.is_open and head.is_untouched and head.autocast == _autocast(head.weight):
            tensors = [*head.inputs, *_tensors((args, options))]
            words = tree_map(_described, (head.inputs, args, options))
            key = (id(head.weight), head.autocast, repr(logits.calls), repr(words))
            if key not in self.ways:
                graph = GraphModule(nn.Module(), _graph_of(logits, args, options))
                found = substitute(graph, {"loss": self.backend.rewrites["loss"]})
                self.backend.graphs.append(found)
                self.ways[key] = graph, found
            way, head.found = self.ways[key]
            if any(one.what for one in head.found):
                loss: Tensor = way(*tensors)
                return loss
        return F.cross_entropy(logits.computed(), *args, **options)


def _autocast(tensor: Tensor) -> tuple[bool, torch.dtype]:
    kind = tensor.device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _tensors(words: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(words) if isinstance(leaf, Tensor))


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad


def _graph_of(logits: LazyLogits, args: tuple[Any, ...], options: dict[str, Any]) -> Graph:
    """Return the way from a head to its loss as a graph of the tensors that it takes."""
    graph = Graph()

    def note(node: Node, shape: Any, dtype: torch.dtype) -> Node:
        one = torch.empty((), dtype=dtype, device=logits.device)
        node.meta["example_value"] = one.expand(shape)
        return node

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return note(graph.placeholder(f"input_{len(graph.nodes)}"), leaf.shape, leaf.dtype)

    inputs = tuple(map(placed, logits.head.inputs))
    words, named = tree_map(placed, (args, options))
    chain = [logits]
    while chain[0].source is not None:
        chain.insert(0, chain[0].source)
    node = note(graph.call_function(F.linear, inputs), chain[0].shape, chain[0].dtype)
    for after in chain[1:]:
        node = note(_called(graph, node, after.calls[-1]), after.shape, after.dtype)
    given = CROSS_ENTROPY.bind(None, *args, **options).arguments
    shape = given["target"].shape if given.get("reduction") == "none" else ()
    # In whatever dtype autocast lets it be.
    two = torch.zeros(1, 2, dtype=logits.dtype, device=logits.device)
    dtype = F.cross_entropy(two, torch.zeros(1, dtype=torch.int64, device=two.device)).dtype
    loss = note(graph.call_function(F.cross_entropy, (node, *words), named), shape, dtype)
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    loss.meta["stack_trace"] = "".join(
        f'File "{frame.filename}", line {frame.lineno}, in {frame.name}\n' for frame in frames
    )
    graph.output(loss)
    return graph


def _called(graph: Graph, logits: Node, call: Call) -> Node:
    name, arguments = call.function.__name__, (logits, *call.arguments)
    if name == "__getitem__":
        return graph.call_function(operator.getitem, arguments)
    if getattr(Tensor, name, None) is call.function:
        return graph.call_method(name, arguments, dict(call.options))
    return graph.call_function(call.function, arguments, dict(call.options))

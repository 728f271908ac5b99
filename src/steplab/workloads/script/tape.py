"""LossTape: how a training script gets from a batch to its loss, so that it can be done again.

Between the call of a model and `backward()` every torch function is noted, a module's call as one.
What the loss does not need is left out; tensors that depend on no weight are data, and become the
batch. The tape is then run in the place of the script's own lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from steplab.core.errors import UserError

Path = tuple[tuple[str, Any], ...]  # from an output to one of its tensors: ("item", 0), ...
RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape)


@dataclass(frozen=True)
class Computed:
    """A tensor in the output of an earlier node."""

    node: int
    path: Path


@dataclass(frozen=True)
class Data:
    """A tensor of the batch."""

    index: int


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the model."""

    name: str


@dataclass(frozen=True)
class Node:
    """One call: of a torch function, or of a module of the model by its path."""

    function: Callable[..., Any] | None  # None: the module
    module: Any  # its path; while it is noted, the module itself
    arguments: tuple[Any, ...]  # tensors are Computed, Data or Weight
    options: Mapping[str, Any]
    with_gradients: bool
    writes: bool  # it changes its first argument in place
    line: str = field(compare=False)

    @property
    def name(self) -> str:
        """What was called, for people."""
        if self.function is None:
            known = isinstance(self.module, str)
            return (
                f"the module {self.module or 'as a whole' if known else type(self.module).__name__}"
            )
        return getattr(self.function, "__name__", str(self.function)).strip("_")


@dataclass(frozen=True)
class LossTape:
    """Calls in their order; the loss is what `loss` refers to."""

    nodes: tuple[Node, ...]
    loss: Computed

    def run(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Return the loss of a batch, whose tensors are in the order of the tape's Data."""
        outputs: list[Any] = []

        def find(word: Any) -> Any:
            if isinstance(word, Computed):
                return _follow(outputs[word.node], word.path)
            if isinstance(word, Data):
                return batch[word.index]
            if isinstance(word, Weight):
                owner, _, name = word.name.rpartition(".")
                return getattr(model.get_submodule(owner), name)
            return word

        for node in self.nodes:
            called = node.function or model.get_submodule(node.module)
            arguments, options = _rebuilt(node.arguments, find), _rebuilt(node.options, find)
            if node.with_gradients:
                output = called(*arguments, **options)
            else:
                with torch.no_grad():
                    output = called(*arguments, **options)
            outputs.append(arguments[0] if node.writes else output)
        loss: Tensor = find(self.loss)
        return loss

    def difference(self, other: LossTape) -> str:
        """Say at which line the tape of another step does something else; "" where none does."""
        for one, two in zip(self.nodes, other.nodes, strict=False):
            if one != two:
                what = one.name if one.name == two.name else f"{one.name}, then {two.name}"
                return f"{two.line or one.line}: {what}"
        count = min(len(self.nodes), len(other.nodes))
        longer = max(self.nodes, other.nodes, key=len)
        return f"{longer[count].line}: {longer[count].name}" if len(longer) > count else ""


class TapeRecorder:
    """Notes the calls of one micro-batch; `cut` makes the tape of its loss."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.computed: dict[int, Computed] = {}  # by the id of a tensor
        self.leaves: list[Tensor] = []  # what no node has computed, as the script has it
        self.values: list[Tensor] = []  # the same, as it was when it was first used
        self.alive: list[Any] = []  # so that no id is given twice

    def depends_on_weights(self, words: Any) -> bool:
        """Whether any tensor among the arguments is trained, or was computed from what is.

        Without gradients, as in an evaluation, weights are data like any other.
        """
        trains = torch.is_grad_enabled()
        return any(
            id(t) in self.computed or (trains and _is_trained(t)) for _, t in _tensors_in(words)
        )

    def note(
        self,
        function: Callable[..., Any] | None,
        module: nn.Module | None,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
        output: Any,
        line: str,
    ) -> None:
        """Note a call whose output depends on weights."""
        name = getattr(function, "__name__", "")
        writes = name in ("__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__")
        writes = writes or (name.endswith("_") and not name.endswith("__"))
        found = list(_tensors_in(arguments[:1] if writes else output))
        if writes:
            found = [((), tensor) for _, tensor in found if not _is_trained(tensor)]
        if not found:  # a number or a shape, or the initialization of a weight
            return
        if function in RESHAPES:
            arguments = _with_open_size(arguments)
        node = Node(
            function,
            module,
            _rebuilt(arguments, self._reference),
            _rebuilt(dict(options), self._reference),
            torch.is_grad_enabled(),
            writes,
            line,
        )
        self.alive.append((arguments, options, output))
        self.computed |= {id(t): Computed(len(self.nodes), path) for path, t in found}
        self.nodes.append(node)

    def _reference(self, word: Any) -> Any:
        if not isinstance(word, Tensor):
            if next(_tensors_in(word), None) is not None:
                raise UserError(f"a {type(word).__name__} with tensors in it is an argument.")
            return word
        if id(word) in self.computed:
            return self.computed[id(word)]
        index = next((i for i, leaf in enumerate(self.leaves) if leaf is word), len(self.leaves))
        if index == len(self.leaves):
            self.leaves.append(word)
            self.values.append(word if word.requires_grad else word.detach().clone())
        return Data(index)

    def used_by(self, loss: Tensor) -> tuple[list[nn.Module], list[Tensor]]:
        """Return the modules that a loss goes through, and the leaves that it was computed from.

        Others are noted too: an average of the weights that is copied from them, an initialization.
        """
        nodes = [self.nodes[number] for number in self._needed(self._last(loss).node)]
        words = _leaves_of([(node.arguments, node.options) for node in nodes])
        leaves = {word.index for word in words if isinstance(word, Data)}
        modules = [node.module for node in nodes if node.module is not None]
        return modules, [self.leaves[index] for index in leaves]

    def _last(self, loss: Tensor) -> Computed:
        if id(loss) not in self.computed:
            raise UserError("backward() is called on a tensor that no module has computed.")
        return self.computed[id(loss)]

    def cut(self, loss: Tensor, root: nn.Module) -> tuple[LossTape, list[Tensor]]:
        """Return the tape of a loss on the weights of `root`, and the data of this micro-batch."""
        last = self._last(loss)
        needed = self._needed(last.node)
        numbers = {old: new for new, old in enumerate(needed)}
        paths = {id(module): name for name, module in root.named_modules()}
        weights: dict[str, Tensor] = dict(root.named_parameters(remove_duplicate=False))
        weights |= dict(root.named_buffers(remove_duplicate=False))
        names = {id(tensor): name for name, tensor in weights.items()}
        data: dict[int, Data] = {}  # by the index of the leaf

        def rename(word: Any) -> Any:
            if isinstance(word, Computed):
                return Computed(numbers[word.node], word.path)
            if not isinstance(word, Data):
                return word
            leaf = self.leaves[word.index]
            if id(leaf) in names:
                return Weight(names[id(leaf)])
            if leaf.requires_grad:
                how = type(leaf.grad_fn).__name__ if leaf.grad_fn is not None else "a parameter"
                raise UserError(
                    f"{node.line}: {node.name} takes a tensor that comes from no call that can be "
                    f"noted and is no weight of {type(root).__name__} ({how})."
                )
            return data.setdefault(word.index, Data(len(data)))

        nodes = []
        for old in needed:
            node = self.nodes[old]
            if node.function is None and id(node.module) not in paths:
                raise UserError(
                    f"{node.line}: the loss goes through a {type(node.module).__name__}, which is "
                    f"no part of {type(root).__name__}, whose weights are trained."
                )
            nodes.append(
                replace(
                    node,
                    module=paths.get(id(node.module), ""),
                    arguments=_rebuilt(node.arguments, rename),
                    options=_rebuilt(node.options, rename),
                )
            )
        tape = LossTape(tuple(nodes), Computed(numbers[last.node], last.path))
        return tape, [self.values[index] for index in data]

    def _needed(self, last: int) -> list[int]:
        """Return the numbers of the nodes that a node depends on, and its own, in order."""
        needed = {last}
        for number in range(last, -1, -1):
            if number in needed:
                words = (self.nodes[number].arguments, self.nodes[number].options)
                needed |= {word.node for word in _leaves_of(words) if isinstance(word, Computed)}
        return sorted(needed)


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _with_open_size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a reshape with -1 as its first size: it may depend on the batch."""
    tensor, *sizes = arguments
    packed = len(sizes) == 1 and isinstance(sizes[0], (list, tuple))
    numbers = list(sizes[0]) if packed else sizes
    if not numbers or not all(type(n) is int for n in numbers) or -1 in numbers:
        return arguments
    numbers[0] = -1
    return (tensor, numbers) if packed else (tensor, *numbers)


def _rebuilt(word: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure of tuples, lists, dicts and slices with every leaf changed."""
    if isinstance(word, Tensor | Computed | Data | Weight):
        return change(word)
    if isinstance(word, slice):
        return slice(*(_rebuilt(part, change) for part in (word.start, word.stop, word.step)))
    if isinstance(word, dict):
        return {key: _rebuilt(value, change) for key, value in word.items()}
    if isinstance(word, (list, tuple)):
        parts = [_rebuilt(part, change) for part in word]
        return type(word)(*parts) if hasattr(word, "_fields") else type(word)(parts)
    return change(word)


def _leaves_of(word: Any) -> list[Any]:
    found: list[Any] = []
    _rebuilt(word, found.append)
    return found


def _tensors_in(word: Any, path: Path = (), depth: int = 4) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors of an output with the way to them: in containers and plain objects."""
    if isinstance(word, Tensor):
        yield path, word
    elif depth and isinstance(word, Mapping):
        for key, value in word.items():
            yield from _tensors_in(value, (*path, ("item", key)), depth - 1)
    elif depth and isinstance(word, (list, tuple)):
        for index, value in enumerate(word):
            yield from _tensors_in(value, (*path, ("item", index)), depth - 1)
    elif depth and dataclasses.is_dataclass(word) and not isinstance(word, type):
        for f in dataclasses.fields(word):
            way = (*path, ("attribute", f.name))
            yield from _tensors_in(getattr(word, f.name), way, depth - 1)


def _follow(output: Any, path: Path) -> Any:
    for kind, key in path:
        output = output[key] if kind == "item" else getattr(output, key)
    return output

"""Which collectives a rank calls in one step, and how much of the model it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steplab.core.run import Collective, Communication
from steplab.parallel import silent
from steplab.parallel.silent import SilentGroup
from steplab.probes.probe import Probe, Subject

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# A word in the name of torch's op, without underscores, and what it is.
KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by kind and by the size of their group, with the bytes of their messages.

    Below DTensor, whose ops are made of others. A silent group is asked without an op.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()
        self.is_silent = dist.is_initialized() and dist.get_backend() == silent.NAME

    def __enter__(self) -> Self:
        if self.is_silent:
            SilentGroup.watch = self._asked
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        if self.is_silent:
            SilentGroup.watch = None

    def _asked(self, name: str, group: SilentGroup, arguments: list[Any]) -> Callable[[], None]:
        kind = collective_kind(name)
        if kind is not None:
            self._count(kind, group.size(), message_bytes(kind, arguments))
        return lambda: None

    def _count(self, kind: str, ranks: int, size: int) -> None:
        self.calls[kind, ranks] += 1
        self.bytes[kind, ranks] += size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op; count it if it is a collective."""
        kwargs = dict(kwargs or {})
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented
        out = func(*args, **kwargs)
        sent = read_collective(func, [*args, *kwargs.values()])
        if sent is not None and not self.is_silent:
            self._count(*sent)
        return out

    def collectives(self) -> tuple[Collective, ...]:
        """Return what was counted."""
        return tuple(
            Collective(*key, calls, self.bytes[key]) for key, calls in sorted(self.calls.items())
        )


def read_collective(func: Any, arguments: list[Any]) -> tuple[str, int, int] | None:
    """Return kind, ranks and message bytes of a collective; None for any other op."""
    if isinstance(func, HigherOrderOperator) or func.namespace not in NAMESPACES:
        return None
    kind = collective_kind(func._overloadpacket.__name__)
    if kind is None:
        return None
    return kind, _group_size(arguments), message_bytes(kind, arguments)


def collective_kind(name: str) -> str | None:
    """Return what torch's op or method of that name is; None for waits and barriers."""
    plain = name.replace("_", "")
    return next((kind for word, kind in KINDS.items() if word in plain), None)


def message_bytes(kind: str, arguments: Iterable[Any]) -> int:
    """Return the bytes of a collective: of input and output the larger one is the whole message.

    Of an all-to-all it is the input, which comes last: what this rank receives others count.
    """
    leaves = [[t for t in tree_leaves(one) if isinstance(t, Tensor)] for one in arguments]
    sizes = [tensor_bytes(tensors) for tensors in leaves if tensors]
    return sizes[-1] if kind == "all-to-all" else max(sizes)


def _group_size(arguments: Iterable[Any]) -> int:
    """Return how many ranks a collective's group has; ops name it or hand it over."""
    for argument in arguments:
        if isinstance(argument, ScriptObject) and "ProcessGroup" in str(argument._type()):
            return int(dist.ProcessGroup.unbox(argument).size())
    return dist.get_world_size()


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of all tensors, of a sharded one those of this rank's part."""
    found = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in found if isinstance(t, Tensor))


class CommunicationProbe(Probe):
    """Counts in one more step, outside the window; nothing where a step is not shared."""

    found: Communication | None = None

    def inspect(self, subject: Subject) -> None:
        """Run one more step under the counter, then weigh what this rank holds."""
        step = subject.step
        if step.parts.scheme is None:
            return
        # Eagerly: compiled code is skipped under a counter, which fullgraph refuses.
        with torch.compiler.set_stance("force_eager"), CollectiveCounter() as counter:
            subject.run_step()
        state = step.optimizer.state.values() if step.optimizer is not None else ()
        held = {
            "weights": tensor_bytes(step.model.parameters()),
            "optimizer state": tensor_bytes(tree_leaves(list(state))),
        }
        trains = subject.spec.mode in ("forward+backward", "full")
        planned = step.parts.scheme.planned(subject.spec.accumulate) if trains else ()
        self.found = Communication(counter.collectives(), held, planned)

    def result(self) -> Communication | None:
        """Return what was found."""
        return self.found


PROBE = CommunicationProbe

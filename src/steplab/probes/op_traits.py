"""What can be told of one operator by its schema, its arguments and its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from steplab.core.dataflow import CAUSAL_MASK, MASKED
from steplab.probes.op_tensors import is_plain, storage_number, tensors_of
from steplab.probes.value_samples import hides_keys_to_come, masked_share
from steplab.probes.zeros import LARGE_TENSOR

FACTORS_ONLY = frozenset(f"aten::{name}" for name in ("mul", "mm", "bmm"))
LINEAR = frozenset(
    f"aten::{name}" for name in "sum mean neg div clone copy _to_copy contiguous cumsum".split()
)


def share_of_large(written: list[Tensor]) -> float:
    """Return the share of what is written that samples were taken of."""
    sizes = [tensor.numel() for tensor in written]
    return sum(n for n in sizes if n >= LARGE_TENSOR) / max(sum(sizes), 1)


def goes_to_host(inputs: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an operator brings something from a device."""
    return any(t.device.type == "cpu" for t in made) and any(t.device.type != "cpu" for t in inputs)


def is_zero(name: str, args: Any, zeros: list[bool]) -> bool:
    """Whether a result is zero: something times the number zero, or what comes of such zeros."""
    plain = name.removesuffix("_")
    if plain == "aten::mul" and any(isinstance(a, (int, float)) and a == 0 for a in args[:2]):
        return True
    if plain in FACTORS_ONLY:
        return any(zeros)
    linear = plain in LINEAR or plain.endswith("_backward")  # in the gradient, the first argument
    return linear and bool(zeros) and zeros[0]


def masked_scores(func: Any, args: Any, kwargs: Any) -> str:
    """Return the letter for the tenths of scores that a mask leaves out, or for a causal mask."""
    if not isinstance(func, OpOverload) or not all(map(is_plain, tensors_of((args, kwargs)))):
        return ""
    tenths = min(9, int(10 * masked_share(func, args, kwargs) + 1e-9))
    if tenths >= 7:
        return MASKED[tenths - 7]
    return CAUSAL_MASK if hides_keys_to_come(func, args, kwargs) else ""


def left_out(func: OpOverload, args: Any, out: Any, place: int = 0) -> int | None:
    """Return the storage of the input's gradient, where backward was asked for others besides.

    At place 1, that of the weight's.
    """
    masks = [n for n, a in enumerate(func._schema.arguments) if a.name == "output_mask"]
    asked: list[bool] = list(args[masks[0]]) if masks and masks[0] < len(args) else []
    several = sum(asked) > 1 and asked[place]
    if several and isinstance(out, tuple) and isinstance(out[place], Tensor):
        return storage_number(out[place])
    return None


def flops(func: OpOverload, args: Any, kwargs: Any, out: Any) -> int:
    """Return what torch's counter says; 0 for what it has no formula for."""
    count = flop_registry.get(func._overloadpacket)
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


def from_front(func: OpOverload, args: Any) -> Any:
    """Return the arguments with dimensions that are counted from the front: -1 is the last one.

    `F.cross_entropy` asks for the dimension 1 of what `F.log_softmax(x, -1)` takes.
    """
    if not args or not isinstance(args[0], Tensor) or not args[0].dim():
        return args
    rank = args[0].dim()

    def counted(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [counted(one) for one in value]
        return value % rank if type(value) is int and -rank <= value < rank else value

    specs = func._schema.arguments
    return [counted(v) if s.name == "dim" else v for s, v in zip(specs, args, strict=False)]


def plain_arguments(args: Any, kwargs: Any) -> str:
    """Return the arguments that are no tensors, as text.

    A storage, which `copy.deepcopy` hands over, would be written out byte by byte.
    """
    plain = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)]
    return repr([x._cdata if isinstance(x, torch.UntypedStorage) else x for x in plain])


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers; a fused attention does only for its dropout."""
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else argument.default_value
            return bool(kwargs.get(argument.name, given))
    return True


def random_state(func: OpOverload, args: Any) -> object:
    """Return where the generators stand: a recomputation puts them back to draw the same."""
    host = hash(torch.get_rng_state().numpy().tobytes())
    if not torch.cuda.is_initialized():
        return host
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return host, generator.initial_seed(), generator.get_offset()

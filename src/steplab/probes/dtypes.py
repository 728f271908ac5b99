"""Dtypes of every module's parameters, outputs and gradients in a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steplab.core import Column, Table

COLUMNS = tuple(map(Column, ("module", "kind", "count", "parameters", "output", "gradients")))
NOTHING = "-"
NOT_CALLED = "not called"
WHOLE_MODEL = "(model)"


def audit_dtypes(model: nn.Module, forward: Callable[[], Tensor]) -> Table:
    """Return the dtypes of parameters, outputs and gradients, one row per kind of module.

    `forward` runs the model and returns a scalar loss; autocast, if any, begins and ends inside
    it, so that backward runs outside. Repeated blocks share a row (`blocks.*.attention.q`).
    Gradients that the model holds are cleared.
    """
    outputs: dict[nn.Module, set[str]] = {}

    def listen(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.setdefault(module, set()).update(_name(t) for t in _tensors(output))

    model.zero_grad(set_to_none=True)
    hooks = [module.register_forward_hook(listen) for module in model.modules()]
    try:
        loss = forward()
    finally:
        for hook in hooks:
            hook.remove()
    torch.autograd.backward(loss)
    rows = [_row(members, outputs) for members in _group_by_kind(model, outputs)]
    rows.append(("loss", NOTHING, 1, NOTHING, _name(loss), NOTHING))
    model.zero_grad(set_to_none=True)
    return Table("dtypes of modules", COLUMNS, tuple(rows))


Member = tuple[str, nn.Module]


def _group_by_kind(model: nn.Module, called: Mapping[nn.Module, Any]) -> list[list[Member]]:
    """Group the modules of the model by class and by path without its numbers."""
    groups: dict[tuple[str, type], list[Member]] = {}
    # A module with several paths (a rotary table) is listed under each of them.
    for path, module in model.named_modules(remove_duplicate=False):
        # Containers are left out: they are never called and have no parameters of their own.
        if module in called or _own(module):
            groups.setdefault((_pattern(path), type(module)), []).append((path, module))
    return list(groups.values())


def _row(
    members: list[Member], outputs: Mapping[nn.Module, set[str]]
) -> tuple[str, str, int, str, str, str]:
    path, first = members[0]
    parameters = [p for _, module in members for p in _own(module)]
    gradients = ["none" if p.grad is None else _name(p.grad) for p in parameters]
    seen = [outputs.get(module, {NOT_CALLED}) for _, module in members]
    return (
        (_pattern(path) if len(members) > 1 else path) or WHOLE_MODEL,
        type(first).__name__,
        len(members),
        _joined(map(_name, parameters)),
        _joined(name for names in seen for name in names),
        _joined(gradients),
    )


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _pattern(path: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in path.split("."))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _joined(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or NOTHING

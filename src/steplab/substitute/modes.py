"""Modes that a traced graph switches for the nodes that follow: gradients, autocast, torch.func."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch.fx import Node

_SWITCH = re.compile(
    r"_set_grad_enabled|_(enter|exit)_(autocast|inference_mode)|_(in|de)crement_nesting"
)


def switches_mode(node: Node) -> bool:
    """Whether a node switches a mode on or off, so that nothing may be moved across it."""
    return _SWITCH.search(_name(node)) is not None


def is_transformed(node: Node) -> bool:
    """Whether a node is inside a function that torch.func maps or differentiates.

    Kernels have no rule for a mapped axis and no second derivative.
    """
    names = [_name(one) for one in _before(node)]
    opened = sum(name.endswith("_increment_nesting") for name in names)
    return opened > sum(name.endswith("_decrement_nesting") for name in names)


def autocasts_around(node: Node) -> list[tuple[Any, ...]]:
    """Return the arguments of every torch.autocast that the graph has open at a node."""
    entered: dict[Node, tuple[Any, ...]] = {}
    for one in _before(node):
        if _name(one) == "_enter_autocast":
            entered[one] = one.args
        elif _name(one) == "_exit_autocast":
            entered.pop(one.args[0])  # type: ignore[arg-type]
    return list(entered.values())


def _name(node: Node) -> str:
    is_call = node.op == "call_function"
    return getattr(node.target, "__name__", "") if is_call else ""


def _before(node: Node) -> Iterable[Node]:
    for one in node.graph.nodes:
        if one is node:
            return
        yield one

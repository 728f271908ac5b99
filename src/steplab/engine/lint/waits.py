"""Calls that make the host wait for the device, by the name that Python or torch gives them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from steplab.engine.lint.hazard import BRANCH, WAIT


class Wait(NamedTuple):
    """What a call does and what to write instead."""

    kind: str
    op: str
    why: str
    remedy: str


READ = "the host reads a value and waits until the device has it"
COPY = "the host waits for a copy of the tensor"
COUNT = "how many results there are depends on the values: the host waits for the number"
KEEP = "keep it a tensor; read it every N steps, after the step"

# Methods of tensors, as Python calls them.
METHODS = {
    "item": Wait(WAIT, ".item()", READ, KEEP),
    "__float__": Wait(WAIT, "float(tensor)", READ, KEEP),
    "__int__": Wait(WAIT, "int(tensor)", READ, KEEP),
    "__index__": Wait(WAIT, "tensor as an index", READ, "index with the tensor, or index_select"),
    "__bool__": Wait(
        BRANCH, "bool(tensor)", "a branch by a value waits for it, and no graph can hold it",
        "compute both and choose with torch.where"
    ),
    "tolist": Wait(WAIT, ".tolist()", COPY, KEEP),
    "numpy": Wait(WAIT, ".numpy()", COPY, KEEP),
    "cpu": Wait(WAIT, ".cpu()", COPY, "copy to pinned memory, non_blocking=True, read it later"),
    "__repr__": Wait(WAIT, "print(tensor)", COPY, "print every N steps, after the step"),
    "__format__": Wait(WAIT, "f'{tensor}'", COPY, "print every N steps, after the step"),
}  # fmt: skip
TO_HOST = METHODS["cpu"]._replace(op='.to("cpu")')

# Operators, however they were called.
MASK = "x[mask]"
OPERATORS = {
    "_local_scalar_dense": METHODS["item"],
    "nonzero": Wait(WAIT, "nonzero", COUNT, "torch.where(mask, a, b), or topk of a fixed size"),
    MASK: Wait(WAIT, MASK, COUNT, "torch.where(mask, x, 0), or gather a fixed number of rows"),
    "masked_select": Wait(WAIT, "masked_select", COUNT, "torch.where(mask, x, 0)"),
    "bincount": Wait(WAIT, "bincount", COUNT, "zeros(n).scatter_add(0, x, ones), or histc"),
    "repeat_interleave": Wait(WAIT, "repeat_interleave", COUNT, "give it output_size="),
    "equal": Wait(WAIT, "torch.equal", READ, "(a == b).all(), kept a tensor"),
    "allclose": Wait(WAIT, "torch.allclose", READ, "torch.isclose(a, b).all(), kept a tensor"),
}
TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe)


def wait_of(func: Any, args: Any) -> Wait | None:
    """Return what is to be said of an operator: that it waits, or nothing."""
    name = func._overloadpacket.__name__
    if name in ("index", "index_put", "index_put_"):
        return OPERATORS[MASK] if _by_mask(name, args) else None
    if not any(tag in func.tags for tag in TAGS):
        return None
    if name in OPERATORS:
        return OPERATORS[name]
    if torch.Tag.cudagraph_unsafe in func.tags:
        reads = "it reads values on the host"
        return Wait(WAIT, f"{func.namespace}::{name}", reads, "use another implementation of it")
    return Wait(WAIT, name.strip("_"), COUNT, "an operation whose result has a fixed size")


def _by_mask(name: str, args: Any) -> bool:
    """Whether a boolean mask selects; filling with one value needs no count."""
    masked = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return masked and (name == "index" or args[2].numel() != 1)

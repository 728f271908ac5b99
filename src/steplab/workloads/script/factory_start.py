"""The start of a factory for a training script that cannot be lifted out.

It holds what the script has shown: where its model's class is, and its optimizer with its options.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steplab.workloads.misuse import needs_closure
from steplab.workloads.script.lift import IMPLEMENTATION
from steplab.workloads.script.watch import Watch

# Names that are in a module which everybody knows them by.
WELL_KNOWN = ((nn, "nn", "from torch import nn"), (torch.optim, "torch.optim", "import torch"))
START = """\
# my_model.py, a start: fill in the dots, then run steplab tune my_model.py:make
{imports}


def make():
    model = {model}

    def batches(size):
        while True:
            yield ...  # of `size` sequences, on any device

    def loss(model, batch):
        return ...  # one scalar tensor; backward() and step() are steplab's

    def optimizer(model, **how):
        return {optimizer}

    return steplab.UserModel(model, batches, loss, optimizer=optimizer)
"""


def factory_start(watch: Watch) -> str:
    """Return the start of a factory, with what the script has shown."""
    imports = {"import steplab"}
    return START.format(
        model=_model(watch, imports),
        optimizer=_optimizer(watch, imports),
        imports="\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line))),
    )


def _model(watch: Watch, imports: set[str]) -> str:
    script = watch.script.name
    if watch.root is None or type(watch.root) is nn.ModuleList:
        return f"...  # one nn.Module that holds all that {script} trains"
    name, comment = _named(type(watch.root), script, imports)
    return f"{name}(...)  # {comment}"


def _optimizer(watch: Watch, imports: set[str]) -> str:
    script = watch.script.name
    known = [watch.stepped[0]] if watch.stepped is not None else watch.optimizers
    found = next((one for one in known if not needs_closure(type(one))), None)
    if found is None:
        return "...  # an optimizer whose step() needs no closure, to which **how is passed on"
    name, comment = _named(type(found), script, imports)
    groups = watch.groups[id(found)]
    options, differing = _options(type(found), groups)
    words = ", ".join(
        ["model.parameters()", *(f"{k}={_literal(v)}" for k, v in options.items()), "**how"]
    )
    if differing:
        comment = f"{script} has {len(groups)} groups, which differ in {', '.join(differing)}"
    elif name.startswith("torch.optim."):
        return f"{name}({words})"
    return f"{name}({words})  # {comment}"


def _named(kind: type, script: str, imports: set[str]) -> tuple[str, str]:
    """Return how a class is called in the start, whose import is added, and a word on it.

    A class of the script itself cannot be imported: that would train.
    """
    name = kind.__name__
    for module, short, line in WELL_KNOWN:
        if getattr(module, name, None) is kind:
            imports.add(line)
            return f"{short}.{name}", f"as in {script}"
    home = sys.modules.get(kind.__module__)
    if kind.__module__ == "__main__" or getattr(home, name, None) is not kind:
        return name, f"the class in {script}: bring it here, or into a file that does not train"
    imports.add(f"from {kind.__module__} import {name}")
    return name, f"as in {script}"


def _options(
    kind: type[Optimizer], groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Return the rate and the options of all groups that are not the class's defaults.

    And the names of those in which the groups differ.
    """
    options, differing = {}, []
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in IMPLEMENTATION or any(name not in group for group in groups):
            continue
        values = [_number(group[name]) for group in groups]
        if any(value != values[0] for value in values):
            differing.append(name)
        elif name == "lr" or values[0] != parameter.default:
            options[name] = values[0]
    return options, differing


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _literal(value: Any) -> str:
    """Return a value as Python; dots where it is none that can be written down."""
    try:
        ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        return "..."
    return repr(value)

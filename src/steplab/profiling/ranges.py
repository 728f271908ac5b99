"""Named ranges on the timeline: phases and batch fetches always, modules in the detailed step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.profiler import record_function

from steplab.core.errors import UserError, did_you_mean
from steplab.core.units import fold_layer_numbers
from steplab.probes.compilation import graph_count
from steplab.probes.probe import Subject
from steplab.probes.source_lines import is_written
from steplab.trace.phases import PHASES

MODULE = "module:"  # what the names of module ranges begin with
# What opens a range in somebody's own code; torch's own have such a letter in their names.
OPENING = ("record_function", "range_push", "nvtx.range", "annotate")
TORCHS = ("#", "::", " ")


@contextlib.contextmanager
def named_range(name: str, on_cuda: bool) -> Iterator[None]:
    """Open a named range for torch's profiler and, on CUDA, for NVIDIA's tools."""
    with record_function(name):
        if not on_cuda:
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def check_range(name: str, model: nn.Module) -> None:
    """Refuse a range that no step of this model can have, before any has run."""
    module = name.removeprefix(MODULE)
    paths = [path for path, _ in outside_compiled(model)]
    known = {*PHASES, "step", type(model).__name__, *filter(None, paths)}
    known |= {fold_layer_numbers(path) for path in known}
    if module in known or any(letter in name for letter in TORCHS):
        return
    begins = module.partition(".")[0] in {path.partition(".")[0] for path in paths}
    if not begins and not name.startswith(MODULE) and is_written(*OPENING):
        return  # it may be one of the user's own
    outermost = {one for one in known if "." not in one}
    close = did_you_mean(module, known)
    raise UserError(
        f"The step has no range and no module {name!r}; inside compiled code there are none.",
        close if close.startswith("Did") else did_you_mean(module, outermost),
    )


@contextlib.contextmanager
def phase_ranges(subject: Subject) -> Iterator[None]:
    """Open a range for every phase of the steps that run inside."""
    before = subject.step.watch
    subject.step.watch = lambda phase: named_range(phase, subject.on_cuda)
    try:
        yield
    finally:
        subject.step.watch = before


def run_named(subject: Subject, then: Callable[[], None]) -> None:
    """Fetch a batch in the range `data`, run one step on it, then call `then`.

    All of it lies in the range `step`: what the host does between phases is part of the step.
    """
    with named_range("step", subject.on_cuda):
        with named_range("data", subject.on_cuda):
            batch = next(subject.feed)
        subject.step(batch)
        then()


@contextlib.contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Open a range `module:<path>` for the forward of every module; the model's has its class name.

    Forward hooks open and close the ranges and change no tensor. A module that several others
    share is named by its path through its caller. A compiled module gets one range around the
    compiled call and none inside: hooks there would be traced, so that the module would be
    compiled again and no longer be the one that was measured.
    """
    running = _Running(type(model).__name__)
    paths: dict[nn.Module, list[str]] = {}
    for path, module in outside_compiled(model):
        paths.setdefault(module, []).append(path)
    undo: list[Callable[[], None]] = []
    try:
        for module, known in paths.items():
            if module._compiled_call_impl is not None:
                undo.append(_wrap_compiled_call(module, known, running))
            else:
                undo.append(module.register_forward_pre_hook(running.entering(known)).remove)
                # always_call: recomputation under checkpointing leaves a forward by exception.
                undo.append(module.register_forward_hook(running.leave, always_call=True).remove)
        yield
    finally:
        for remove in undo:
            remove()


class _Running:
    """The modules whose forward is running, outermost first, each with its range."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._open: list[tuple[str, record_function]] = []

    def range_of(self, known: Sequence[str]) -> tuple[str, record_function]:
        """Return the path, one of `known`, by which the module was called, and its range."""
        path = nearest_path(known, self._open[-1][0] if self._open else "")
        return path, record_function(f"{MODULE}{path or self._model_name}")

    def entering(self, known: Sequence[str]) -> Callable[..., None]:
        """Return the hook that opens the range of a module with these paths."""

        def hook(module: nn.Module, inputs: Any) -> None:
            path, entered = self.range_of(known)
            entered.__enter__()
            self._open.append((path, entered))

        return hook

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Close the range that was opened last."""
        self._open.pop()[1].__exit__(None, None, None)


def nearest_path(known: Sequence[str], caller: str) -> str:
    """Return the path with the longest common prefix with the caller's; the first among equals."""
    within = caller.split(".")

    def shared(path: str) -> int:
        pairs = zip(path.split("."), within, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(known, key=shared)


def outside_compiled(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of all modules that no compiled region contains, parents first.

    A module compiled by `module.compile()`, or whose forward is compiled, is yielded, but none
    inside it. A module wrapped by `torch.compile(module)` is not, nor are scripted modules.
    """
    if isinstance(module, (OptimizedModule, torch.jit.ScriptModule)):
        return
    yield path, module
    if is_compiled(module):
        return
    for name, child in module.named_children():
        yield from outside_compiled(child, f"{path}.{name}" if path else name)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is a compiled region of its own."""
    return (
        isinstance(module, OptimizedModule)
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def can_name_modules(model: nn.Module) -> bool:
    """Whether hooks stay outside compiled code; not if it is unknown what was compiled."""
    return not graph_count() or any(is_compiled(module) for module in model.modules())


def _wrap_compiled_call(
    module: nn.Module, known: Sequence[str], running: _Running
) -> Callable[[], None]:
    compiled = module._compiled_call_impl
    assert compiled is not None

    def ranged(*args: Any, **kwargs: Any) -> Any:
        with running.range_of(known)[1]:
            return compiled(*args, **kwargs)

    def put_back() -> None:
        module._compiled_call_impl = compiled

    module._compiled_call_impl = ranged
    return put_back

"""Names on the timeline: phases and the fetch of a batch always, modules in the detailed step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.profiler import record_function

from steplab.probes.compilation import graph_count
from steplab.probes.probe import Subject

MODULE = "module:"  # what the names of module ranges begin with


@contextlib.contextmanager
def named_range(name: str, on_cuda: bool) -> Iterator[None]:
    """Name what happens inside, for torch's profiler and, on CUDA, for NVIDIA's tools too."""
    with record_function(name):
        if not on_cuda:
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


@contextlib.contextmanager
def phase_ranges(subject: Subject) -> Iterator[None]:
    """Name the phases of every step that runs inside."""
    before = subject.step.watch
    subject.step.watch = lambda phase: named_range(phase, subject.on_cuda)
    try:
        yield
    finally:
        subject.step.watch = before


def run_named(subject: Subject, then: Callable[[], None]) -> None:
    """Fetch a batch in the range `data`, run one step on it, then what belongs to it.

    All of it lies in the range `step`: what the host does between phases is its own work too.
    """
    with named_range("step", subject.on_cuda):
        with named_range("data", subject.on_cuda):
            batch = next(subject.feed)
        subject.step(batch)
        then()


@contextlib.contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Name the forward of every module `module:<path>`; the model itself by its class.

    Forward hooks enter and leave the ranges and change nothing that flows through. A compiled
    module gets one range around the compiled call and none inside: a hook in there would be
    traced, so the module would be compiled anew and no longer be the one that was measured.
    """
    open_ranges: list[record_function] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            entered = record_function(name)
            entered.__enter__()
            open_ranges.append(entered)

        return hook

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    undo: list[Callable[[], None]] = []
    try:
        for path, module in outside_compiled(model):
            name = f"{MODULE}{path or type(model).__name__}"
            if module._compiled_call_impl is not None:
                undo.append(_wrap_compiled_call(module, name))
            else:
                undo.append(module.register_forward_pre_hook(enter(name)).remove)
                # always_call: recomputation under checkpointing leaves a forward by exception.
                undo.append(module.register_forward_hook(leave, always_call=True).remove)
        yield
    finally:
        for remove in undo:
            remove()


def outside_compiled(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of all modules that no compiled region contains, parents first.

    A module that `module.compile()` compiled, or whose forward is, is yielded; those inside it
    are not. Of one that `torch.compile(module)` wrapped neither is, nor are scripted modules.
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
    """Whether hooks stay outside compiled code: not so when it is unknown what was compiled."""
    return not graph_count() or any(is_compiled(module) for module in model.modules())


def _wrap_compiled_call(module: nn.Module, name: str) -> Callable[[], None]:
    compiled = module._compiled_call_impl
    assert compiled is not None

    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return compiled(*args, **kwargs)

    def put_back() -> None:
        module._compiled_call_impl = compiled

    module._compiled_call_impl = ranged
    return put_back

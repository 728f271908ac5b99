"""The same compiled kernels, launched one by one instead of replayed from a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config


@contextlib.contextmanager
def cuda_graphs_off() -> Iterator[None]:
    """Compile what runs inside without Inductor's CUDA graphs, whatever mode was asked for.

    A replayed graph is one launch: nothing tells which line, operator or module a kernel in it
    comes from. Modes such as reduce-overhead override Inductor's global setting, hence the
    wrapper around the compiler call. Compiled code is dropped at both ends; Inductor's cache
    makes the next compilation quick.
    """
    compiler: Any = torch._TorchCompileInductorWrapper
    original = compiler.__call__

    def without_graphs(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept, self.config = self.config, {**self.config, "triton.cudagraphs": False}
        try:
            return original(self, *args, **kwargs)
        finally:
            self.config = kept

    torch._dynamo.reset()
    compiler.__call__ = without_graphs
    try:
        with torch._inductor.config.patch({"triton.cudagraphs": False}):
            yield
    finally:
        compiler.__call__ = original
        torch._dynamo.reset()

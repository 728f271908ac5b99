"""Calls of compiled code while a step runs as if nothing were compiled.

A compiled graph cannot be watched op by op, but the code that it was made of can: Dynamo's stance
`force_eager` runs it as it is written. Python tells when such a call begins and what it returns.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import eval_frame
from torch.utils._pytree import tree_leaves

from steplab.trace.lines import innermost_line

OUTSIDE = -1  # the number of no call
# What torch.compile returns is a closure of this name.
WRAPPER = "compile_wrapper"


@dataclass(frozen=True)
class GraphOutput:
    """A tensor that a call of compiled code returned."""

    call: int
    storage: int
    bytes: int
    has_gradient: bool


class CompiledCalls:
    """Numbers the outermost calls of compiled code, and knows in which one the host is."""

    def __init__(self) -> None:
        self.followed = False  # whether there may be any
        self.current = OUTSIDE
        self.lines: list[str] = []  # that make the calls
        self.outputs: list[GraphOutput] = []
        self._depth = 0
        self._wrapper = _wrapper_code()

    @contextlib.contextmanager
    def run_eagerly(self) -> Iterator[None]:
        """Run compiled code op by op inside the block, and follow its calls."""
        before, self.followed = sys.getprofile(), True
        with torch.compiler.set_stance("force_eager"):
            sys.setprofile(self._told)
            try:
                yield
            finally:
                sys.setprofile(before)

    def _told(self, frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code is not self._wrapper:
            return
        if event == "call":
            self._depth += 1
            if self._depth == 1:
                self.current = len(self.lines)
                self.lines.append(running_line(frame))
        elif event == "return":
            self._depth -= 1
            if self._depth == 0:
                self.outputs += _outputs(self.current, arg)
                self.current = OUTSIDE


def running_line(frame: FrameType | None) -> str:
    """Return the innermost line of user code that is running; "" if there is none."""

    def frames() -> Iterator[tuple[str, int, str]]:
        one = frame
        while one is not None:
            yield one.f_code.co_filename, one.f_lineno, one.f_code.co_name
            one = one.f_back

    return innermost_line(frames()) or ""


def _outputs(call: int, returned: Any) -> Iterator[GraphOutput]:
    for leaf in tree_leaves(returned):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            storage = leaf.untyped_storage()
            yield GraphOutput(call, storage._cdata, storage.nbytes(), leaf.requires_grad)


def _wrapper_code() -> CodeType | None:
    constants = eval_frame._TorchDynamoContext.__call__.__code__.co_consts
    codes = [one for one in constants if isinstance(one, CodeType)]
    return next((code for code in codes if code.co_name == WRAPPER), None)

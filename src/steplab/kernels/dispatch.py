"""Choosing an implementation of an op: the one asked for runs, or the user is told why it cannot.

An op is a folder here and an implementation a file in it; a file with a leading underscore holds
what several implementations share. An implementation that cannot take all inputs has a function
`refuse`, which is given the inputs that the choice depends on and returns the reason, or "". Two
more names are read from the file without importing it: `NEEDS_GPU = True`, and `NOT_TUNED = "..."`
with the reason why a search for speed leaves it out.

A Triton implementation is one such file: its kernels, their launch, and the op around them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steplab.core.errors import Unsupported, UserError, did_you_mean

AUTO = "auto"
REFERENCE = "reference"  # the definition: written to be read, not to be quick


def ops() -> list[str]:
    """Return the ops that have a folder here, without importing any."""
    return sorted(p.parent.name for p in Path(__file__).parent.glob("*/__init__.py"))


def impls(op: str) -> list[str]:
    """Return the names of an op's implementations, without importing any."""
    if op not in ops():
        raise UserError(f"There is no op called {op!r}.", did_you_mean(op, ops()))
    return sorted(p.stem for p in (Path(__file__).parent / op).glob("[a-z]*.py"))


def load(op: str, impl: str) -> Any:
    """Import the module of one implementation."""
    known = impls(op)
    if impl not in known:
        raise UserError(f"{op} has no implementation {impl!r}.", did_you_mean(impl, [*known, AUTO]))
    return importlib.import_module(f"steplab.kernels.{op}.{impl}")


def load_all(op: str) -> dict[str, Any]:
    """Import all implementations of an op, so that torch.compile traces plain look-ups."""
    return {impl: load(op, impl) for impl in impls(op)}


def refusal(module: Any, *inputs: Any) -> str:
    """Return why an implementation cannot take these inputs, or ""."""
    reason: str = module.refuse(*inputs) if hasattr(module, "refuse") else ""
    return reason


def select(
    op: str, loaded: Mapping[str, Any], preference: Sequence[str], impl: str, *inputs: Any
) -> str:
    """Return the implementation to run: the one asked for, or an error that says why it cannot.

    `auto` takes the first of the preference that does not refuse the inputs; the last one is taken
    unasked.
    """
    if impl == AUTO:
        for name in preference[:-1]:
            if not refusal(loaded[name], *inputs):
                return name
        return preference[-1]
    if impl not in loaded:
        raise UserError(f"{op} has no implementation {impl!r}.", did_you_mean(impl, loaded))
    reason = refusal(loaded[impl], *inputs)
    if reason:
        raise Unsupported(f"{op} {impl!r} {reason}.", f"Use impl.{op}=auto.")
    return impl


def worth_trying(op: str, impl: str) -> bool:
    """Whether a search for speed should try an implementation."""
    return not _assigns(op, impl, "NOT_TUNED")


def needs_gpu(op: str, impl: str) -> bool:
    """Whether an implementation runs on GPUs only."""
    return _assigns(op, impl, "NEEDS_GPU")


def _assigns(op: str, impl: str, name: str) -> bool:
    text = (Path(__file__).parent / op / f"{impl}.py").read_text(encoding="utf-8")
    return any(line.startswith(f"{name} =") for line in text.splitlines())

"""Choosing an implementation: ask and get, or be told no."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steplab.core.errors import Unsupported, UserError, did_you_mean

AUTO = "auto"
REFERENCE = "reference"  # written to be read; not meant to be quick


def ops() -> list[str]:
    """Return the ops that have a folder here, without importing any."""
    return sorted(p.parent.name for p in Path(__file__).parent.glob("*/__init__.py"))


def impls(op: str) -> list[str]:
    """Return the implementations of `op`: its files, without importing any.

    Files with a leading underscore hold what several implementations share.
    """
    if op not in ops():
        raise UserError(f"There is no op called {op!r}.", did_you_mean(op, ops()))
    return sorted(p.stem for p in (Path(__file__).parent / op).glob("[a-z]*.py"))


def load(op: str, impl: str) -> Any:
    """Import the module of one implementation."""
    known = impls(op)
    if impl not in known:
        raise UserError(f"{op} has no implementation {impl!r}.", did_you_mean(impl, [*known, AUTO]))
    return importlib.import_module(f"steplab.kernels.{op}.{impl}")


def select(
    op: str, loaded: Mapping[str, Any], preference: Sequence[str], impl: str, *inputs: Any
) -> str:
    """Return the implementation to run: the one asked for, or else say why it cannot.

    `auto` takes the first of the preference that does not refuse the inputs; the last one of it
    takes everything.
    """
    if impl == AUTO:
        for name in preference[:-1]:
            if not loaded[name].refuse(*inputs):
                return name
        return preference[-1]
    if impl not in loaded:
        raise UserError(f"{op} has no implementation {impl!r}.", did_you_mean(impl, loaded))
    reason = loaded[impl].refuse(*inputs)
    if reason:
        raise Unsupported(f"{op} {impl!r} {reason}.", f"Use impl.{op}=auto.")
    return impl


def worth_trying(op: str, impl: str) -> bool:
    """Whether a search for speed should try an implementation.

    A file that assigns UNTRIED, with the reason, computes something else than the definition, is
    there to be measured against or for one model only. Nothing is imported.
    """
    return not _assigns(op, impl, "UNTRIED")


def needs_gpu(op: str, impl: str) -> bool:
    """Whether an implementation runs on GPUs only: its file assigns NEEDS_GPU. None is imported."""
    return _assigns(op, impl, "NEEDS_GPU")


def _assigns(op: str, impl: str, name: str) -> bool:
    text = (Path(__file__).parent / op / f"{impl}.py").read_text(encoding="utf-8")
    return any(line.startswith(f"{name} =") for line in text.splitlines())

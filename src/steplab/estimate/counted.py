"""Counted: a step of rank 0 of N, run on tensors without data, in this process and on any machine.

The step is the one that `bench` measures and `train` runs. Two of them run: the first makes the
optimizer's state, the second is noted.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves

from steplab.core import Recipe, RunSpec
from steplab.core.errors import MeasurementError, SteplabError, Unsupported
from steplab.core.run import Collective
from steplab.estimate.calls import Call
from steplab.estimate.compiled import compiled_modules, fuse, marking, recomputed
from steplab.estimate.fake_card import fake_card
from steplab.estimate.ledger import Entry, Kernel, Ledger, Sent, following
from steplab.hardware.catalog import Card
from steplab.parallel.silent import join_silent
from steplab.parallel.world import leave
from steplab.step.assemble import assemble, micro_batches
from steplab.step.failures import error_sentence
from steplab.step.step import Step
from steplab.techniques.optimizer import ADAM_8BIT
from steplab.techniques.precision import FP8, product_dtype
from steplab.techniques.recipes import PARALLEL
from steplab.trace.user_frames import error_line
from steplab.workloads.workload import Workload

GRAPH, COMPILE = "cuda_graph", "compile"
NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@dataclass(frozen=True)
class Counted:
    """What a step does and holds, by counting."""

    spec: RunSpec
    entries: tuple[Entry, ...]
    peak_bytes: int  # allocated, as torch counts it
    reserved_bytes: int
    held_bytes: int  # between two steps
    kinds: Mapping[str, int]  # of the peak
    parameters: int  # whole ones
    own_parameters: int  # of this rank
    tokens: int  # of this rank's micro-batches
    model_flops: float | None = None  # of this rank, recomputation left out
    replayed: bool = False  # by a CUDA graph: the host launches nothing

    @property
    def messages(self) -> tuple[Sent, ...]:
        """What this rank sends in one step, one by one."""
        return tuple(entry for entry in self.entries if isinstance(entry, Sent))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What this rank sends in one step, by kind."""
        calls: dict[tuple[str, int], list[int]] = {}
        for entry in self.messages:
            calls.setdefault((entry.op, entry.ranks), []).append(entry.bytes)
        return tuple(Collective(*key, len(b), sum(b)) for key, b in sorted(calls.items()))


def count(
    spec: RunSpec,
    card: Card,
    scratch: Callable[[Call], int] | None = None,
    workload: Workload | None = None,
) -> Counted:
    """Count one step of `spec` on `card`; as rank 0, where ranks share it.

    `scratch` tells how many bytes a call needs beside its results.
    """
    dtype = spec.recipe.techniques.get("precision", {}).get("dtype", "fp32")
    if product_dtype(str(dtype)) == FP8:
        raise Unsupported(
            "A step with fp8 cannot be estimated: what its casts cost is not modeled.",
            "Estimate precision=bf16, or measure with steplab bench step.",
        )
    if spec.recipe.techniques.get("optimizer", {}).get("impl") == ADAM_8BIT:
        raise Unsupported(
            f"An update by {ADAM_8BIT} cannot be estimated: it compiles itself while it runs.",
            "Leave the optimizer out, or measure with steplab bench step.",
        )
    ledger = Ledger(scratch)
    replayed, compiles = (name in spec.recipe.techniques for name in (GRAPH, COMPILE))
    eager = replace(spec, device="cuda", recipe=_eager(spec.recipe))
    with _group(spec), fake_card(card, ledger), following(ledger), ledger, naming(spec.workload):
        step = assemble(eager, workload)
        _refuse_recurrent(step.model)
        step.watch = ledger.watch
        for parameter in [*step.model.parameters(), *step.model.buffers()]:
            ledger.follow(_local(parameter))
        feed = micro_batches(step, eager)
        step(next(feed))
        batch = next(feed)
        gc.collect()
        held = ledger.allocator.allocated
        kinds = _kinds(step, ledger, batch)
        ledger.begin()
        step.watch = _noting_gradients(step, ledger, kinds)
        scope = spec.recipe.techniques.get(COMPILE, {}).get("scope", "")
        modules = compiled_modules(step.model, str(scope)) if compiles else []
        with marking(ledger, modules) if compiles else contextlib.nullcontext():
            step(batch)
        peak, reserved = ledger.allocator.peak_allocated, ledger.allocator.peak_reserved
        if compiles:
            smaller = ledger.leave_out(recomputed(ledger, kinds))
            peak, reserved = smaller, reserved + smaller - peak
        return Counted(
            spec,
            fuse(ledger.entries) if compiles else tuple(ledger.entries),
            peak,
            reserved,
            held,
            ledger.at_peak(kinds),
            sum(p.numel() for p in step.model.parameters()),
            sum(_local(p).numel() for p in step.model.parameters()),
            step.workload.tokens(spec.batch) * spec.accumulate,
            _model_flops(step, spec, ledger),
            replayed,
        )


def _model_flops(step: Step, spec: RunSpec, ledger: Ledger) -> float | None:
    """Return the workload's formula, or three times the forward of a model that has none."""
    ran = {str(m.op): str(m.ran) for m in step.model.modules() if hasattr(m, "op")}
    formula = step.workload.work(spec.batch, spec.mode, ran)
    if formula is not None:
        return None if formula.model is None else formula.model * spec.accumulate
    forward = sum(
        entry.call.flops
        for entry in ledger.entries
        if isinstance(entry, Kernel) and entry.phase == "forward"
    )
    return forward * (3 if spec.mode in ("forward+backward", "full") else 1)


def _eager(recipe: Recipe) -> Recipe:
    """Return the recipe without what is modelled: the compiler, graphs, torch's own DDP.

    DDP reduces buckets in C++ that needs data; `bucket` sends the same bytes at the same times.
    """
    kept = {key: how for key, how in recipe.techniques.items() if key not in (GRAPH, COMPILE)}
    if kept.get(PARALLEL, {}).get("data") == "ddp":
        kept[PARALLEL] = {**kept[PARALLEL], "data": "bucket"}
    return Recipe(kept)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _kinds(step: Step, ledger: Ledger, batch: Any) -> dict[int, str]:
    """Return the kind of every storage that is there between two steps."""
    found: dict[int, str] = {}
    state = step.optimizer.state.values() if step.optimizer is not None else ()
    held = {
        "other": tree_leaves(batch),
        "optimizer state": tree_leaves(list(state)),
        "weights": [*step.model.parameters(), *step.model.buffers()],
    }
    for kind, leaves in held.items():
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                found[ledger.follow(_local(leaf))] = kind
    return found


def _noting_gradients(step: Step, ledger: Ledger, kinds: dict[int, str]) -> Any:
    """Return a watch that also notes which storages are gradients when a backward has ended."""

    @contextlib.contextmanager
    def watch(phase: str) -> Iterator[None]:
        with ledger.watch(phase):
            yield
        if phase == "backward":
            for p in step.model.parameters():
                if p.grad is not None:
                    kinds.setdefault(ledger.follow(_local(p.grad)), "gradients")

    return watch


def _refuse_recurrent(model: nn.Module) -> None:
    """On tensors without data torch would run them word by word, in thousands of kernels."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            raise Unsupported(
                f"A model with nn.{type(module).__name__} cannot be estimated: on a GPU cuDNN runs "
                "it, in kernels that nobody has timed.",
                "Measure with steplab bench step.",
            )


@contextlib.contextmanager
def _group(spec: RunSpec) -> Iterator[None]:
    """Be rank 0 of the spec's ranks, of which the others do not exist."""
    shared = PARALLEL in spec.recipe.techniques and not dist.is_initialized()
    if shared:
        join_silent(spec.ranks)
    try:
        yield
    finally:
        if shared:
            leave()


@contextlib.contextmanager
def naming(workload: str) -> Iterator[None]:
    """Say in one sentence which op of a model needs the data that is not there, or what fails."""
    try:
        yield
    except SteplabError:
        raise
    except NEEDS_DATA as error:
        op = error.args[0] if error.args else type(error).__name__
        raise Unsupported(
            f"{workload} cannot be counted: {op} at {error_line(error)} needs values, and there "
            "are only shapes.",
            "Compute it on the device without reading it, or measure with steplab bench step.",
        ) from None
    except Exception as error:
        raise MeasurementError(
            f"{workload} cannot be counted, its step fails: {error_sentence(error)}.",
            "See that it runs with steplab bench step.",
        ) from error

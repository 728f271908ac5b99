"""The references of the gate: the plain step in fp64, and its peers in lower precision.

They are computed in a process of its own that is never measured, so what they leave behind there
does not matter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steplab.core import PLAIN, RunSpec
from steplab.core.errors import MeasurementError, SteplabError, Unsupported, UserError
from steplab.kernels.fp64_masks import Fp64Masks
from steplab.modules.adam_8bit import round_moments, rounded_parameters
from steplab.modules.fp8 import (
    PAYS,
    emulate_layers,
    plan_layers,
)
from steplab.step.assemble import assemble, micro_batches
from steplab.step.failures import error_sentence, is_out_of_memory
from steplab.step.loop import forward_eagerly
from steplab.step.step import Step
from steplab.step.trial import clean_up
from steplab.techniques.recipes import alone
from steplab.verify.draws import take_draws
from steplab.verify.judge import judge
from steplab.verify.noise import dropout_off, fills_at_random, fixed_noise
from steplab.verify.numerics import (
    NumericsSnapshot,
    load_references,
    reference_path,
    save_snapshot,
    take_snapshot,
    unit_roundoff,
)
from steplab.verify.rounding import RoundedProducts, RoundedStream
from steplab.verify.shapes import (
    AUTOCAST,
    DOWN,
    DRAWS,
    FP8,
    PLAIN_DTYPE,
    REFUSES,
    ROUNDED,
    ROUNDED_STATE,
    STREAM,
    STRETCHED,
    TRUTH,
    UP,
    GateShape,
    dtype_of,
    references_of,
    rounding_name,
)
from steplab.verify.widened import Widened

SHAKE = 16
STRETCH = 2**0.5  # of the scales of fp8: as far from one power of two as from the next
_SHAKE_SEED = 20_012


def make_references(shape: GateShape, dtype: str, folder: Path) -> str:
    """Write what candidates of `dtype` are judged by; return why it cannot be had, or ""."""
    names = references_of(dtype)
    if shape.apart and not shape.curves:  # it drops at random
        names = (*names, DRAWS)
    # What a model has compiled by itself runs as it is written: Dynamo compiles nothing beside the
    # modes of a wider truth, and what it was told to compile whole then fails in any dtype.
    with _half_of_the_threads(), torch.compiler.set_stance("force_eager"):
        problems = (_make_reference(shape, name, folder) for name in names)
        return next(filter(None, problems), "")


@contextlib.contextmanager
def _half_of_the_threads() -> Iterator[None]:
    """Leave cores to others: on a busy machine every barrier waits for a thread without a core.

    Beside two busy processes on two cores fp64 took 3 to 11 s with two threads and 1.4 to 1.7 s
    with one; alone 0.7 and 1.1 s. Nothing is measured here.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _make_reference(shape: GateShape, dtype: str, folder: Path) -> str:
    path = reference_path(folder, shape.name, dtype)
    if path.exists():
        return ""
    try:
        snapshot = compute_reference(shape, dtype)
    except Exception as error:
        computed = PLAIN_DTYPE if dtype == TRUTH and shape.narrow else dtype
        if is_out_of_memory(error):
            return f"{computed} does not fit"
        if dtype == TRUTH:  # without any other dtype only its own candidates are left out
            _refuse_broken_step(shape, error)
        return f"{REFUSES} {computed}: {error_sentence(error)}"
    finally:
        clean_up()
    if dtype == TRUTH:
        _refuse_nonfinite_loss(snapshot)
    save_snapshot(snapshot, path)
    return ""


def _refuse_broken_step(shape: GateShape, seen: Exception) -> None:
    """Raise what fails in any dtype in its own words: then fp64 is not the reason."""
    if isinstance(seen, UserError):
        raise seen
    try:
        step = step_without_dropout(shape.spec)
        step(next(micro_batches(step, shape.spec)))
    except SteplabError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise MeasurementError(f"The step fails: {error_sentence(error)}.") from None


def _refuse_nonfinite_loss(truth: NumericsSnapshot) -> None:
    """Nothing can be judged by a loss that is NaN or infinite in fp64, at any shape."""
    for step, loss in truth.groups.get("loss", {}).items():
        if not math.isfinite(loss):
            raise MeasurementError(
                f"The loss of the plain step is {float(loss)} in fp64 ({step}), so no recipe "
                "can be judged by it.",
                "Check the model, its batches and its learning rate.",
            )


def compute_reference(shape: GateShape, name: str) -> NumericsSnapshot:
    """Return what the plain step computes at a shape, by one of the names of `references_of`.

    "fp64" is the truth and "fp32" the plain step as it is. "bf16-rounded" is the truth with the
    factors and results of every matrix product rounded to bf16, which the precision cannot avoid;
    "fp8-rounded" also rounds the operands of the layers that fp8 pays for to e4m3, and
    "fp8-stretched" rounds them at other numbers, by scales that are STRETCH times as large.
    "bf16-stream" rounds what lies between products as well, but for what autocast computes in fp32.
    "fp64-state" is the truth whose AdamW keeps its moments in 8 bits.
    "bf16-autocast" is the plain step under torch's autocast, which also rounds between products.
    "fp32-up" and "fp32-down" are the plain step from weights that are SHAKE roundings off.
    "draws" are its statistics with dropout and noise, which are held still otherwise.
    """
    if name == DRAWS:
        return take_draws(assemble(replace(shape.spec, recipe=PLAIN)), shape.spec)
    with dropout_off():
        return _plain_snapshot(shape, name)


def _plain_snapshot(shape: GateShape, name: str) -> NumericsSnapshot:
    spec, rate, curves = shape.spec, shape.rate, shape.curves
    step = step_without_dropout(replace(spec, recipe=PLAIN), shape.chosen_batch)
    dtype, _, how = name.partition("-")
    if how in (UP, DOWN):
        shake_weights(step, 1 if how == UP else -1)
    if how == AUTOCAST:
        _lower_precision(step, dtype)
    if how == ROUNDED_STATE:
        _round_state(step, shape.widened)
    if name == TRUTH or how in (ROUNDED, STRETCHED, STREAM, ROUNDED_STATE):
        kind = torch.float32 if shape.narrow else torch.float64
        rounding: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if how in (ROUNDED, STRETCHED):
            rounding = RoundedProducts(dtype, kind)
        if how == STREAM:
            rounding = RoundedStream(dtype, kind, step)
        if dtype == FP8:
            _round_layers_to_fp8(step, shape.widened, STRETCH if how == STRETCHED else 1.0)
        if shape.widened:
            with Widened(rounding):
                return take_snapshot(step, spec, rate, curves=curves)
        if shape.narrow:
            with rounding:
                return replace(take_snapshot(step, spec, rate, curves=curves), exact=False)
        step.model.double()
        with rounding, Fp64Masks():
            return take_snapshot(step, spec, rate, doubled=True, curves=curves)
    return take_snapshot(step, spec, rate, curves=curves)


def _round_state(step: Step, widened: bool) -> None:
    """Let the optimizer keep its moments as 8 bits would."""
    if widened or step.optimizer is None:  # the fp64 beside each operator would not be rounded
        raise Unsupported("State in 8 bits is judged only for models that run in fp64.")
    round_moments(step.optimizer, rounded_parameters(step.model))


def _round_layers_to_fp8(step: Step, widened: bool, stretch: float) -> None:
    """Round the operands of the layers for which the technique chooses fp8, as it does."""
    if widened:  # the fp64 beside each operator would not be rounded
        raise Unsupported("fp8 is judged only for models that run in fp64.")
    reasons = plan_layers(step.model, step.parts.device, step.parts.tokens)
    names = [name for name, reason in reasons.items() if reason == PAYS]
    emulate_layers(step.model, names, stretch)


def shake_weights(step: Step, sign: int) -> None:
    """Move every weight by SHAKE roundings of fp32, up or down at random; `sign` turns all around.

    A unit that is that near to a kink changes sides in one of the two directions, so both together
    show what honest fp32 steps of this model differ by.
    """
    source = torch.Generator().manual_seed(_SHAKE_SEED)
    with torch.no_grad():
        for p in step.model.parameters():
            way = torch.randint(0, 2, p.shape, generator=source).to(p.device) * 2 - 1
            p.mul_(1 + sign * SHAKE * unit_roundoff(PLAIN_DTYPE) * way)


def _lower_precision(step: Step, dtype: str) -> None:
    """Let torch itself run the step in tf32, bf16 or fp16."""
    kind = step.parts.device.type
    if dtype == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        return
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    step.parts.forward_context = lambda: torch.autocast(kind, dtype=half)
    if half is torch.float16:
        step.parts.scaler = torch.amp.GradScaler(kind)


def step_without_dropout(spec: RunSpec, chosen_batch: int = 0) -> Step:
    """Return a step whose dropout is off: implementations draw different random numbers."""
    step = assemble(spec, chosen_batch=chosen_batch)
    for module, name in find_dropout(step.model):
        setattr(module, name, 0.0)
    return step


def snapshot_without_dropout(
    spec: RunSpec, rate: float = 1.0, curves: bool = False, chosen_batch: int = 0
) -> NumericsSnapshot:
    """Return what the recipe of `spec` computes when nothing is dropped."""
    with dropout_off():
        fills = fills_at_random(lambda: _forward(step_without_dropout(spec, chosen_batch), spec))
        step = step_without_dropout(spec, chosen_batch)
        return take_snapshot(step, spec, rate, curves=curves, fixed_fills=fills)


def find_dropout(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules that drop something, and the name of the attribute that says how much."""
    found = []
    for module in model.modules():
        name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
        share = getattr(module, name, None)
        if isinstance(share, float) and share > 0:
            found.append((module, name))
    return found


def why_undecided(shape: GateShape, dtype: str, folder: Path) -> str:
    """Return what of an honest step that rounds to `dtype` would not pass, and why; or "".

    The references of the shape lie in the folder.
    """
    truth, *peers = load_references(folder, shape.name, dtype)
    checks = judge(replace(peers[-1], matmul_dtype=dtype_of(dtype)), peers, truth, "")
    return next((f"{c.name} in {dtype}: {c.detail}" for c in checks if not c.passed), "")


def has_dropout(spec: RunSpec) -> bool:
    """Whether the model of `spec` draws at random what can be held still: dropout or noise."""
    try:
        if find_dropout(assemble(spec).model):
            return True
        if not _draws(assemble(spec), spec):
            return False
        with dropout_off(), fixed_noise():
            return not _draws(assemble(spec), spec)
    finally:
        clean_up()


def _draws(step: Step, spec: RunSpec) -> bool:
    """Whether a forward pass takes random numbers."""
    on_cuda = step.parts.device.type == "cuda"
    batch = next(micro_batches(step, spec))[0]
    state = torch.cuda.get_rng_state if on_cuda else torch.get_rng_state
    before = state()
    forward_eagerly(step, spec.mode, batch)
    return not torch.equal(before, state())


def _forward(step: Step, spec: RunSpec) -> None:
    """Run one forward pass op by op."""
    forward_eagerly(step, spec.mode, next(micro_batches(step, spec))[0])


def dry_run(spec: RunSpec, shape: GateShape) -> str:
    """Assemble a recipe at the gate's shape and run one forward pass eagerly.

    What it cannot do here is raised in its own words, in a tenth of a second instead of a process
    of its own. Returns the rounding that it declares (`references_of`). There is one process here:
    how ranks share the step is left to the ranks.
    """
    here = replace(shape.spec, recipe=alone(spec.recipe))
    try:
        step = assemble(here, chosen_batch=shape.chosen_batch)
        _forward(step, here)
        parts = step.parts
        return rounding_name(parts.matmul_dtype, bool(parts.master_weights), parts.state_format)
    finally:
        clean_up()

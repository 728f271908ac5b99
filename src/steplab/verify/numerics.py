"""NumericsSnapshot: what a step computes, in sketches that are small enough to compare.

Gradients of a large model in fp64 fill gigabytes, but two processes that compare them need only
their distance. A sketch of some thousand numbers keeps it: sketching is linear, so sketch(a) -
sketch(b) = sketch(a - b), and the squared norm of a sketch is an unbiased estimate of the tensor's.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from steplab.core import RunSpec
from steplab.core.errors import MeasurementError, UserError
from steplab.core.output_file import write_output
from steplab.modules.optimizer import (
    MASTER,
    clear_moments,
    full_weights,
    master_weight,
    numbers_of,
)
from steplab.modules.shards import whole
from steplab.step.assemble import micro_batches
from steplab.step.step import Step
from steplab.verify.noise import fixed_noise, hashed, seed_all
from steplab.verify.ranks import checksum, gather, held_bits, rank_count, state_of
from steplab.verify.shapes import CURVE_STEPS, TRUTH, references_of, rounding_name

# Steps that are compared. A whole-step graph runs three of them eagerly, captures in the next and
# is replayed after that, so the last ones show what the graph computes.
STEPS = 8
GRADIENT_STEPS = 2  # the first ones, run op by op: a replayed graph shows no gradients
MAX_REPEATS = 20  # of a step that a gradient scaler skips; it halves from 65,536
# Tensors of up to this many numbers are kept whole; for larger ones the norm of a difference is
# estimated with a relative standard deviation of about 1 / sqrt(2 * 4096) = 1.1 %.
SKETCH_SIZE = 4096
_SEED = 20_011
# Of a snapshot in a file, beside its groups.
PLAIN_FIELDS = ("roundoff", "matmul_dtype", "terms", "first_seconds", "bits", "exact")
OUTPUTS, CHOICES = "outputs", "choices"
BUFFERS = "buffers"
NAN_BUFFERS = "NaN in buffers"
UPDATE_RULE = "update rule"
RULE_STEPS = 4  # enough for momentum and for corrections that depend on the number of the step
# Given gradients are powers of two from 2^-4 to 2^-11: small enough to show another eps, and near
# enough to each other for second moments of 8 bits.
SIZES = range(4, 12)
STATE = "optimizer"  # begins the name of a group of the optimizer's state
# Of the significand, the hidden one included. Products of fp8 numbers give bf16 ones.
BITS = {"fp32": 24, "tf32": 11, "bf16": 8, "fp16": 11, "fp8": 8}


@dataclass(frozen=True)
class NumericsSnapshot:
    """Sketches in fp64 on the CPU. `first_seconds` is the first step's time, compilation included.

    Groups by name: "weights" (as assembled), "outputs" (predictions, and each metric over all
    steps), "choices" (predictions that are integers or booleans), "loss" (one per step),
    "gradients" (of each parameter, in each gradient step), "update" (how far each parameter has
    moved after all steps), "batches" (each micro-batch that was fed), "buffers", "NaN in
    buffers" (where it is, of those that have any), and one group for each key of the optimizer's
    state. Where several ranks share the step, this is what they have
    together. Over many steps: "losses" and "moves" (of all parameters), by quarters, for
    each quarter the average of a metric ("outputs") and how far a buffer moved ("buffers"), and
    "update rule" (how far given gradients move each parameter).
    """

    groups: Mapping[str, Mapping[str, Tensor]]
    roundoff: Mapping[str, float]  # of each parameter's dtype, or of what it is a copy of
    matmul_dtype: str  # as declared by the techniques
    terms: int  # numbers in the largest tensor of a micro-batch: how long a sum may get
    first_seconds: float = 0.0
    state_format: str = ""  # of the optimizer's state, where that is rounded
    narrow_weights: bool = False  # whether products and all else read weights of 16 bits
    exact: bool = True  # of a truth: whether it is one of fp64; else it is one of fp32
    bits: Mapping[str, int] = field(default_factory=dict)  # checksums of gradients, final weights
    # Of every rank that shared the step, checksums of what it holds; empty for a step of one.
    held: Sequence[Mapping[str, int]] = ()

    @property
    def rounding(self) -> str:
        """What decides by which references it is judged (`references_of`)."""
        return rounding_name(self.matmul_dtype, self.narrow_weights, self.state_format)


def take_snapshot(
    step: Step,
    spec: RunSpec,
    rate: float = 1.0,
    doubled: bool = False,
    curves: bool = False,
    fixed_fills: bool = True,
) -> NumericsSnapshot:
    """Run STEPS steps of a freshly assembled step, whose learning rate is multiplied by `rate`.

    The random numbers are seeded first, so that every process gets the same batches. With `doubled`
    the model has been cast to fp64. With `curves` many more steps are run, and less of them kept.
    Without `fixed_fills` it fills no tensor at random, or is measured afterwards (`fixed_noise`).
    """
    scale_learning_rates(step, rate)
    seed_all(spec.seed)
    feed = micro_batches(step, spec)
    batches = [next(feed) for _ in range(CURVE_STEPS if curves else STEPS)]
    groups = {"batches": _sketch_batches(step, batches)}
    look = _curves if curves else _snapshot
    if not doubled:
        with fixed_noise(in_place=fixed_fills):
            return look(step, batches, groups)
    torch.set_default_dtype(torch.float64)  # for tensors that a model makes in its forward pass
    try:
        with fixed_noise():
            return look(step, tree_map(_to_double, batches), groups)
    finally:
        torch.set_default_dtype(torch.float32)


def scale_learning_rates(step: Step, rate: float) -> None:
    """Multiply the learning rates; not undone: the time of a step does not depend on them."""
    for group in step.optimizer.param_groups if step.optimizer else ():
        if "lr" in group:
            group["lr"] = group["lr"] * rate  # not in place: groups may share a tensor


def _snapshot(
    step: Step, batches: list[Any], groups: dict[str, dict[str, Tensor]]
) -> NumericsSnapshot:
    gradients = Gradients(step)
    weights = groups["weights"] = _parameters(step)
    if step.mode == "infer":
        seconds = _infer(step, batches, groups)
    else:
        seconds = _train(step, batches, groups, gradients)
        groups["gradients"] = gradients.sketches
    if step.mode == "full":
        moved = _parameters(step)
        groups["update"] = {name: moved[name] - weights[name] for name in weights}
    groups |= _lasting(step)
    exact = {name: _full_weight(step, p) for name, p in step.model.named_parameters()}
    bits = gradients.bits | {name: checksum(whole(weight)) for name, weight in exact.items()}
    held = gradients.held | held_bits(state_of(step)) if rank_count(step) else {}
    roundoff = {name: torch.finfo(weight.dtype).eps / 2 for name, weight in exact.items()}
    terms = _longest_sum(batches)
    dtype, every = step.parts.matmul_dtype, gather(held, rank_count(step)) if held else ()
    found = NumericsSnapshot(groups, roundoff, dtype, terms, seconds, bits=bits, held=every)
    return _declared(found, step)


def _declared(snapshot: NumericsSnapshot, step: Step) -> NumericsSnapshot:
    """Return the snapshot with what decides by which references it is judged."""
    parts = step.parts
    return replace(
        snapshot, state_format=parts.state_format, narrow_weights=bool(parts.master_weights)
    )


def _curves(
    step: Step, batches: list[Any], groups: dict[str, dict[str, Tensor]]
) -> NumericsSnapshot:
    """Run all steps, and keep losses, metrics, and how far all that lasts moves, by quarters.

    All parameters together: one whose true gradient is zero moves by rounding alone.
    """
    quarter = len(batches) // 4
    losses, moves = groups.setdefault("losses", {}), groups.setdefault("moves", {})
    groups[UPDATE_RULE] = _given_updates(step)
    averages: dict[str, list[Tensor]] = {}
    buffer_moves: dict[str, list[float]] = {}
    before, buffers = _parameters(step), _buffers(step)
    for start in range(0, len(batches), quarter):
        name = f"steps {start} to {start + quarter - 1}"
        run = [run_until_updated(step, step, b) for b in batches[start : start + quarter]]
        losses[name] = torch.stack([output.loss.detach().double().cpu() for output in run])
        for metric in run[0].metrics:
            seen = torch.stack([sketch(output.metrics[metric]) for output in run])
            averages.setdefault(metric, []).append(seen.mean(0))
        now, buffers_now = _parameters(step), _buffers(step)
        moved = [distance(now[n], before[n]) for n in now]
        moves[name] = torch.tensor(moved, dtype=torch.float64).norm()
        for one in buffers:
            buffer_moves.setdefault(one, []).append(distance(buffers_now[one], buffers[one]))
        before, buffers = now, buffers_now
    groups[OUTPUTS] = {name: torch.cat(means) for name, means in averages.items()}
    groups[BUFFERS] = {n: torch.tensor(m, dtype=torch.float64) for n, m in buffer_moves.items()}
    found = NumericsSnapshot(groups, {}, step.parts.matmul_dtype, _longest_sum(batches))
    return _declared(found, step)


def _given_updates(step: Step) -> dict[str, Tensor]:
    """Return how far given gradients move every parameter, and leave the step as it was.

    Gradients of 16 bits are 1 % off, and so is an update by them: a weight decay that is left out
    hides there. Those that are given are powers of two, the same in any dtype. What an optimizer
    keeps outside of its state stays, in all that are compared.
    """
    optimizer = step.optimizer
    assert optimizer is not None
    params = [*step.model.parameters()]
    with torch.no_grad(), full_weights(optimizer):
        kept = [p.clone() for p in params]
    before = _parameters(step)
    sparse = {id(m.weight) for m in step.model.modules() if getattr(m, "sparse", False)}
    for number in range(RULE_STEPS):
        for p in filter(lambda p: p.requires_grad, params):
            given = _given_gradient(p, number)
            p.grad = given.to_sparse(1) if id(p) in sparse else given
        optimizer.step()
    after = _parameters(step)
    step.model.zero_grad()  # of all parameters, also of those that are not updated
    clear_moments(optimizer)
    with torch.no_grad(), full_weights(optimizer):
        for p, weight in zip(params, kept, strict=True):
            p.copy_(weight)
    return {name: after[name] - before[name] for name in after}


def _given_gradient(p: Tensor, number: int) -> Tensor:
    drawn = hashed(torch.arange(p.numel(), device=p.device) + 1 + number * p.numel())
    kind = torch.floor(drawn * 2 * len(SIZES))  # of each size a positive and a negative one
    size = 2.0 ** -(SIZES.start + torch.floor(kind / 2))
    return ((1 - 2 * (kind % 2)) * size).view(p.shape).to(p.dtype)


def _longest_sum(batches: list[Any]) -> int:
    return max((x.numel() for x in tree_leaves(batches[0]) if isinstance(x, Tensor)), default=1)


def _infer(step: Step, batches: list[Any], groups: dict[str, dict[str, Tensor]]) -> float:
    """Run the steps and add "outputs" and "choices"; return the seconds of the first one.

    A step returns no predictions, so they are taken from its forward pass. A graph that is replayed
    runs no Python, but writes to the tensors that the pass returned when it was captured.
    """
    found: list[Any] = []
    forward = step.forward

    def keeping(model: nn.Module, batch: Any) -> Any:
        found.append(forward(model, batch))
        return found[-1]

    step.forward = keeping
    outputs = groups.setdefault(OUTPUTS, {})
    choices: dict[str, list[Tensor]] = {}
    seconds = 0.0
    try:
        for number, batch in enumerate(batches):
            start = perf_counter()
            step(batch)
            del found[: -len(batch)]
            for name, x in _named_tensors(found):
                if _is_choice(x):
                    choices.setdefault(name, []).append(_sketch_choices(x))
                else:
                    outputs[f"{name} in step {number}"] = sketch(x)
            seconds = seconds or perf_counter() - start
    finally:
        step.forward = forward
    groups[CHOICES] = {name: torch.cat(parts) for name, parts in choices.items()}
    return seconds


def _train(
    step: Step, batches: list[Any], groups: dict[str, dict[str, Tensor]], gradients: Gradients
) -> float:
    """Run the steps and add their results; return the seconds of the first one."""
    losses: list[Tensor] = []
    metrics: dict[str, list[Tensor]] = {}
    start, seconds = perf_counter(), 0.0
    groups |= _predictions(step, batches[0][0])
    for number, batch in enumerate(batches):
        if number < GRADIENT_STEPS:
            with gradients.watched(number):
                output = run_until_updated(step, step.run, batch)
        else:
            output = run_until_updated(step, step, batch)
        losses.append(output.loss.detach().double().cpu())
        seconds = seconds or perf_counter() - start
        for name, metric in output.metrics.items():
            metrics.setdefault(name, []).append(sketch(metric))
    # All steps of a metric together: one that counts, as an accuracy does, jumps in a single one.
    groups[OUTPUTS] |= {name: torch.cat(found) for name, found in metrics.items()}
    groups["loss"] = {f"step {number}": loss for number, loss in enumerate(losses)}
    return seconds


def run_until_updated(step: Step, run: Any, batch: Any) -> Any:
    """Run a step; one whose update a gradient scaler skipped changed nothing and is repeated."""
    scaler = step.parts.scaler
    for _ in range(MAX_REPEATS):
        before = scaler.get_scale()
        output = run(batch)
        if step.mode != "full" or scaler.get_scale() >= before:
            return output
    raise MeasurementError("The gradients overflow at any scale: every update is skipped.")


class Gradients:
    """The gradients of the first steps: unscaled, summed over ranks, and before clipping."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.sketches: dict[str, Tensor] = {}
        self.bits: dict[str, int] = {}
        self.held: dict[str, int] = {}

    @contextlib.contextmanager
    def watched(self, number: int) -> Iterator[None]:
        """Look at every gradient when all ranks have added theirs, or after the backward."""
        last = "sync" if rank_count(self.step) else "backward"

        @contextlib.contextmanager
        def watch(phase: str) -> Iterator[None]:
            yield
            if phase == last:
                self._record(number)

        before, self.step.watch = self.step.watch, watch
        try:
            yield
        finally:
            self.step.watch = before

    def _record(self, number: int) -> None:
        scale = self.step.parts.scaler.get_scale()
        scheme = self.step.parts.scheme
        for name, p in self.step.model.named_parameters():
            if scheme is not None and p.requires_grad:
                gradient = scheme.summed_gradient(p)
            else:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
            key = f"{name} in step {number}"
            if rank_count(self.step):
                self.held |= held_bits([(f"the gradient of {key}", gradient)])
            gradient = whole(gradient)
            self.sketches[key] = sketch(gradient) / scale
            self.bits[key] = checksum(gradient)


def _predictions(step: Step, batch: Any) -> dict[str, dict[str, Tensor]]:
    """Sketch what the model predicts in training, by the code that trains it.

    That is compiled for gradients: without them it would be compiled once more.
    """
    with step.parts.forward_context():
        found = list(_named_tensors(step.workload.predict(step.model, batch)))
    return {
        OUTPUTS: {name: sketch(x) for name, x in found if not _is_choice(x)},
        CHOICES: {name: _sketch_choices(x) for name, x in found if _is_choice(x)},
    }


def _named_tensors(tree: Any) -> Iterator[tuple[str, Tensor]]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    yield from ((f"prediction {index}", leaf) for index, leaf in enumerate(leaves))


def _is_choice(x: Tensor) -> bool:
    """Whether a tensor holds no amounts but ids or answers, which are equal or not.

    A single integer is a count.
    """
    return x.ndim > 0 and not (x.is_floating_point() or x.is_complex())


def _sketch_choices(x: Tensor) -> Tensor:
    """Sketch points on a circle, one for each value: any two that differ are far apart.

    The squares of their distances are 2 on average, so their sum counts what is unequal.
    """
    angle = 2 * math.pi * hashed(x.detach().long())
    return sketch(torch.polar(torch.ones_like(angle), angle))


def _sketch_batches(step: Step, steps: list[Any]) -> dict[str, Tensor]:
    """Return one sketch for all tensors of every micro-batch, in the order of one process."""
    own = [[_sketch_batch(batch) for batch in batches] for batches in steps]
    ranks = gather(own, rank_count(step))  # (rank, step, micro-batch of the rank)
    return {
        f"micro-batch {index * len(ranks) + rank} of step {number}": found
        for rank, batches in enumerate(ranks)
        for number, one in enumerate(batches)
        for index, found in enumerate(one)
    }


def _sketch_batch(batch: Any) -> Tensor:
    parts = [sketch(x) for x in tree_leaves(batch) if isinstance(x, Tensor)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _lasting(step: Step) -> dict[str, dict[str, Tensor]]:
    """Sketch what else lives on between steps: buffers, and the optimizer's state by its key."""
    groups: dict[str, dict[str, Tensor]] = {BUFFERS: _buffers(step)}
    unset = {name: whole(buffer).isnan() for name, buffer in step.model.named_buffers()}
    groups[NAN_BUFFERS] = {name: sketch(where) for name, where in unset.items() if where.any()}
    names: dict[Tensor, str] = {p: name for name, p in step.model.named_parameters()}
    for p, state in step.optimizer.state.items() if step.optimizer is not None else ():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != MASTER:
                groups.setdefault(f"{STATE} {key}", {})[names[p]] = sketch(whole(numbers_of(value)))
    for other in gather(groups, rank_count(step)):  # a rank may keep the state of some parameters
        for group, members in other.items():
            groups[group] = {**members, **groups.get(group, {})}
    return groups


def _buffers(step: Step) -> dict[str, Tensor]:
    """Sketch the buffers, with other numbers for what has no distance.

    A mask may hold infinities: they become ones. NaN may say that nothing was seen yet: it becomes
    zero, and where it was is a group of its own.
    """
    finite = {
        name: torch.nan_to_num(whole(buffer), 0.0, posinf=1.0, neginf=-1.0)
        for name, buffer in step.model.named_buffers()
    }
    return {name: sketch(buffer) for name, buffer in finite.items()}


def _parameters(step: Step) -> dict[str, Tensor]:
    return {name: sketch(whole(_full_weight(step, p))) for name, p in step.model.named_parameters()}


def _full_weight(step: Step, p: nn.Parameter) -> Tensor:
    """Return the fp32 weights whose rounded copy a parameter is; without any, the parameter.

    In bf16 alone, small updates look like rounding.
    """
    master = master_weight(step.optimizer, p)
    return master if master is not None and torch.equal(whole(master.to(p.dtype)), whole(p)) else p


def _to_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def sketch(tensor: Tensor) -> Tensor:
    """Return at most SKETCH_SIZE numbers in fp64 on the CPU for a tensor of any shape and dtype.

    Larger tensors get random signs, the same in every process on the same device, and are folded
    to SKETCH_SIZE numbers by adding.
    """
    tensor = tensor.detach()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    if flat.numel() <= SKETCH_SIZE:
        return flat.to("cpu", torch.float64, copy=True)
    source = torch.Generator(flat.device).manual_seed(_SEED)
    folded = torch.zeros(SKETCH_SIZE, dtype=torch.float64, device=flat.device)
    # In pieces: signs and fp64 copies of a large tensor at once would take ten times its memory.
    for piece in flat.split(SKETCH_SIZE * 4096):
        signs = torch.randint(0, 2, piece.shape, generator=source, device=piece.device)
        signed = piece.double() * (2 * signs - 1)
        short = -len(signed) % SKETCH_SIZE
        folded += torch.nn.functional.pad(signed, (0, short)).view(-1, SKETCH_SIZE).sum(0)
    return folded.cpu()


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference of two sketches; infinity where one is not finite."""
    if a.shape != b.shape or not bool((torch.isfinite(a) & torch.isfinite(b)).all()):
        return float("inf")
    return float((a - b).norm())


def unit_roundoff(dtype: str) -> float:
    """Return the largest relative error of one rounding to a dtype of BITS."""
    return 2.0 ** -BITS[dtype]


def reference_path(folder: Path, shape: str, name: str) -> Path:
    """Return the file of one reference: the shape's name, and one of `references_of`."""
    return folder / f"{shape}-{name}.safetensors"


def save_snapshot(snapshot: NumericsSnapshot, path: Path) -> None:
    """Write a snapshot; a reader sees all of it or nothing."""
    tensors = {
        f"{group}/{name}": tensor.clone()  # of its own memory, as the format asks
        for group, members in snapshot.groups.items()
        for name, tensor in members.items()
    }
    fields = {field: getattr(snapshot, field) for field in PLAIN_FIELDS}
    # As bytes: sketches are small, and the library's own file says of a full disk that it is bad.
    write_output(path, save(tensors, {"snapshot": json.dumps(fields)}), "--store")


def load_references(folder: Path, shape: str, rounding: str) -> list[NumericsSnapshot]:
    """Return the truth, and the peers of candidates that declare `rounding`."""
    names = (TRUTH, *references_of(rounding))
    return [load_snapshot(reference_path(folder, shape, name)) for name in names]


def load_snapshot(path: Path) -> NumericsSnapshot:
    """Read a snapshot; a file that is none is a UserError."""
    groups: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, "pt") as file:
            fields = json.loads((file.metadata() or {})["snapshot"])
            for key in file.keys():  # noqa: SIM118, a file cannot be iterated over
                group, _, name = key.partition("/")
                groups.setdefault(group, {})[name] = file.get_tensor(key)
        return NumericsSnapshot(groups, **{field: fields[field] for field in PLAIN_FIELDS})
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no reference of the gate ({type(error).__name__}: {error}).",
            "Remove it: it is computed again.",
        ) from None

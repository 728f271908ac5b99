"""RunSpec to Step: build the workload, apply the techniques in the order of their stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch._functorch.config

from steplab.core import Mode, Recipe, RunSpec
from steplab.core.errors import Unsupported, UserError, no_gpu
from steplab.modules.optimizer import ExtendedOptimizer, set_master_weights
from steplab.modules.precision import round_bf16_sums
from steplab.modules.rates import DeviceRates
from steplab.step.compiled_update import uncompile_at_changes
from steplab.step.graph import graph_step, make_capturable
from steplab.step.hooks import HookGuard
from steplab.step.prefetch import Prefetched, started
from steplab.step.step import Step
from steplab.techniques.recipes import PARALLEL, check_recipe, lacks_scheme, technique
from steplab.techniques.technique import StepParts
from steplab.workloads.user_model import UserWorkload
from steplab.workloads.workload import Workload, find_workload


def assemble(spec: RunSpec, workload: Workload | None = None, chosen_batch: int = 0) -> Step:
    """Return the Step that `spec` describes, on its device, ready for its first call.

    `chosen_batch`: the batch for which techniques choose layers, where it is not that of `spec`.
    """
    check_recipe(spec.recipe)
    check_ranks(spec)
    device = find_device(spec.device)
    torch.manual_seed(spec.seed)
    workload = workload or find_workload(spec.workload, spec.source).open(spec.config)
    with torch.device(device):
        model = workload.model()
    tokens = workload.tokens(chosen_batch or spec.batch)
    if isinstance(workload, UserWorkload) and workload.tokens(1) == 1:
        tokens = 0  # a sample may have any number of rows
    return build_step(workload, model, device, spec.recipe, spec.mode, spec.clip, tokens)


def build_step(
    workload: Workload,
    model: torch.nn.Module,
    device: torch.device,
    recipe: Recipe,
    mode: Mode,
    clip: float,
    tokens: int = 0,
) -> Step:
    """Apply a checked recipe to a model on its device and return the Step.

    `tokens`: of a micro-batch; 0: nobody knows.

    Global torch settings that techniques touch are reset first, so that one step cannot leak into
    the next.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # torch's default lets convolutions use TF32
    round_bf16_sums(True)  # torch's default
    torch._functorch.config.activation_memory_budget = 1.0
    torch._functorch.config.ban_recompute_materialized_backward = True
    torch._functorch.config.enable_autograd_cache = True
    parts = StepParts(model, device, torch.amp.GradScaler(device.type, enabled=False), tokens)
    chosen = [(technique(name), settings) for name, settings in recipe.techniques.items()]
    for found, settings in sorted(chosen, key=lambda pair: pair[0].stage):
        found.apply(parts, settings)
    if parts.loader_workers and not isinstance(workload, UserWorkload):
        raise Unsupported(
            "prefetch.workers is for models of your own that read a DataLoader: this workload "
            "makes its batches itself.",
            "Leave workers out of the recipe.",
        )
    optimizer = None
    if mode == "full":
        optimizer = workload.optimizer(model, **parts.optimizer_options)
        _check_update(optimizer, parts.optimizer_options)
        if parts.replace_optimizer is not None:
            optimizer = parts.replace_optimizer(optimizer)
        if parts.master_weights:
            set_master_weights(optimizer, parts.master_weights)
        if parts.scheme is not None:
            parts.scheme.prepare_optimizer(optimizer)
        plain_update = optimizer.step
        if parts.wrap_optimizer_step is not None:
            optimizer.step = parts.wrap_optimizer_step(optimizer.step)  # type: ignore[method-assign]
    step = Step(workload, parts, optimizer, mode, clip)
    if optimizer is not None and _reads_rates_on_device(parts, optimizer):
        step.rates = DeviceRates(optimizer, device)
    if optimizer is not None and parts.wrap_optimizer_step is not None:
        uncompile_at_changes(optimizer, plain_update)
    if parts.graph_warmup:
        graph_step(step)
    if parts.graph_warmup or parts.is_compiled:
        step.hooks = HookGuard(model, optimizer, captured=step.graph is not None)
    return step


def _check_update(optimizer: torch.optim.Optimizer, asked: Mapping[str, bool]) -> None:
    """Refuse an optimizer whose maker did not pass on what the recipe asks for."""
    for option, wanted in asked.items():
        if any(bool(group.get(option)) != wanted for group in optimizer.param_groups):
            raise UserError(
                f"The recipe asks for {option}={wanted}, which the function that makes the "
                "optimizer does not pass on.",
                "Write lambda model, **how: AdamW(model.parameters(), **how) or the like, or leave "
                "optimizer= out of the recipe.",
            )


def _reads_rates_on_device(parts: StepParts, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a rate must be a tensor: in a capture, in compiled code, in a kernel of our own."""
    is_compiled = parts.wrap_optimizer_step is not None
    is_captured = parts.graph_warmup > 0 and make_capturable(optimizer)
    return is_compiled or is_captured or isinstance(optimizer, ExtendedOptimizer)


def micro_batches(step: Step, spec: RunSpec, workers: int = 0) -> Iterator[list[Any]]:
    """Yield what one call of the step takes: a list of `spec.accumulate` micro-batches.

    `workers` processes make them, as a measurement asks for. Whoever compares numbers leaves them
    out: a dataset that draws random numbers draws others in each process.
    """
    device, ahead = step.parts.device, step.parts.batches_ahead
    if workers and isinstance(step.workload, UserWorkload):
        stream = started(step.workload.batches(spec.batch, device, spec.seed, workers))
    else:
        stream = iter(step.workload.batches(spec.batch, device, spec.seed))
    if step.parts.scheme is not None:
        # Micro-batch number g of a step belongs to rank g % ranks, so that all ranks together see
        # what one rank would see.
        world = step.parts.scheme.world
        stream = islice(stream, world.rank, None, world.size)
    if ahead:
        stream = Prefetched(stream, device, ahead)
    while True:
        try:
            batches = [next(stream) for _ in range(spec.accumulate)]
        except StopIteration:
            raise UserError(
                "The workload ran out of batches.", "Let batches() yield forever."
            ) from None
        yield batches


def check_ranks(spec: RunSpec) -> None:
    """Refuse a spec for more or fewer ranks than there are, or for ranks that share nothing."""
    if lacks_scheme(spec.recipe, spec.ranks):
        raise UserError(
            f"{spec.ranks} ranks with the recipe {spec.recipe} would train a model each.",
            "Add parallel=ddp or another scheme to the recipe.",
        )
    if PARALLEL in spec.recipe.techniques:
        from steplab.parallel.world import current_world

        world = current_world()
        if world.size != spec.ranks:
            raise UserError(
                f"The step is shared by {spec.ranks} ranks, but this process is {world}.",
                "Start as many ranks as the spec says.",
            )


def find_device(name: str) -> torch.device:
    """Return the device, or raise a UserError when it is not there."""
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        raise no_gpu()
    raise UserError(f"There is no device {name!r}.", "Use cpu or cuda.")

"""`script:train.py`: a training script, unedited, as a model of one's own.

Every process that measures runs the script again until it has made a few steps, and goes on from
there with the script's model, its batches and the tape of its loss. Survey is what the command line
learns of it.
"""

from __future__ import annotations

import shlex
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.core.spec import option

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from steplab.workloads.script.watch import Watched
    from steplab.workloads.user_model import UserModel

# Options that say how an update is computed, which is the recipe's part, or that torch adds.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "initial_lr", "decoupled")


@dataclass(frozen=True)
class ScriptSettings:
    """How the script is called, and how it is recognized."""

    arguments: str = option("", "words for the script, as a shell takes them")
    start: str = option("", "hash of its first weights and batches; tune fills it in")


@dataclass(frozen=True)
class Survey:
    """What a script does, for the command line; or why it cannot be lifted out."""

    batch: int = 1
    accumulate: int = 1
    clip: float = 0.0
    start: str = ""
    recipe: str = "plain"  # what the script does already, as words of a recipe
    words: str = ""  # for people
    refusal: str = ""
    remedy: str = ""
    beginning: str = ""  # of a factory for a script that cannot be lifted out
    ended: bool = False  # it was not steplab that stopped the script


def survey(spec: RunSpec) -> Survey:
    """Run the script of a spec in this process and say what it does."""
    from steplab.workloads.script.run import CannotLift
    from steplab.workloads.user_model import find_script

    arguments = str(spec.config["arguments"])
    try:
        watched = watch(find_script(spec.workload, spec.source), arguments)
    except CannotLift as error:
        return Survey(
            refusal=error.message,
            remedy=error.suggestion,
            beginning=error.beginning,
            ended=error.ended,
        )
    batch = _batch_size(watched)
    recipe = ",".join(f"{name}={value}" for name, value in watched.recipe.items()) or "plain"
    made = type(watched.optimizer).__name__
    count = sum(p.numel() for p in watched.model.parameters())
    words = (
        f"{type(watched.model).__name__} with {count:,} weights, {made}, "
        f"{len(watched.tape.nodes)} calls to its loss, batches of {batch}"
    )
    words = "; ".join([words, *watched.notes])
    return Survey(batch, watched.accumulate, watched.clip, _hash_of(watched), recipe, words=words)


def watch(script: Path, arguments: str) -> Watched:
    """Run a script until it has made a few steps."""
    from steplab.workloads.script.run import watch_script

    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise UserError(f"--arguments: {error}.") from None
    return watch_script(script, words)


def make(script: Path, arguments: str, start: str) -> UserModel:
    """Return the model, batches, loss and optimizer of a script, as it begins."""
    from steplab.workloads.user_model import UserModel

    watched = watch(script, arguments)
    found = _hash_of(watched)
    if start and start != found:
        raise UserError(
            f"{script.name} does not begin as it did before: its weights or its batches differ.",
            "Seed every random generator that it uses; torch, numpy and random are seeded.",
        )
    # A step averages its micro-batches, where the script adds up what it calls backward() on.
    times = watched.accumulate

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        value = watched.tape.run(model, batch)
        return value * times if times > 1 else value

    return UserModel(
        watched.model,
        _batches(script.name, watched),
        loss,
        _tokens(watched),
        optimizer=_optimizer(watched),
    )


def _batch_size(watched: Watched) -> int:
    """Return the first size of the first tensor of the batch that has one."""
    return next((t.shape[0] for t in watched.batches[0] if t.ndim), 1)


def _tokens(watched: Watched) -> int:
    """Return the length of the sequences where the model takes token ids (B, T), else 1."""
    first = watched.batches[0][0] if watched.batches[0] else None
    is_ids = first is not None and first.ndim == 2 and not first.is_floating_point()
    return int(first.shape[1]) if is_ids and first is not None else 1


def _batches(name: str, watched: Watched) -> Callable[[int], Iterable[list[Tensor]]]:
    """Return the script's own batches, cut to fewer sequences where fewer are asked for."""
    own = _batch_size(watched)

    def batches(size: int) -> list[list[Tensor]]:
        if size > own:
            raise UserError(
                f"{name} has batches of {own}, not of {size}.",
                f"Use --batch {own} or less, or give the script another batch size.",
            )
        return [
            [t[:size] if t.ndim and t.shape[0] == own else t for t in batch]
            for batch in watched.batches
        ]

    return batches


def _optimizer(watched: Watched) -> Callable[..., torch.optim.Optimizer]:
    """Return a function that makes the script's optimizer anew, with the options it was made by."""
    kind: Any = type(watched.optimizer)

    def optimizer(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        groups: list[dict[str, Any]] = []
        for group in watched.groups:
            options = {k: v for k, v in group.items() if k not in (*IMPLEMENTATION, "params")}
            groups.append({**options, "params": [named[name] for name in group["params"]]})
        made: torch.optim.Optimizer = kind(groups, **implementation)
        return made

    return optimizer


def _hash_of(watched: Watched) -> str:
    """Return a hash of weights and batches, the same in every process that begins equally."""
    import torch

    code = 0
    tensors = [*watched.model.state_dict().values(), *(t for b in watched.batches for t in b)]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            code = zlib.crc32(raw.tobytes(), code)
    return f"{code:08x}"

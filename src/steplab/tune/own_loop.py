"""The winner of a search in the place of a training step that somebody has written. No torch."""

from __future__ import annotations

from pathlib import Path

from steplab.core.ladder import Ladder
from steplab.techniques.recipes import technique
from steplab.workloads.workload import HUGGING_FACE

# Techniques that loops often have in torch's own form. A step is measured without that, also where
# the recipe that won has no such technique.
USUAL = ("precision", "compile")
HF_LOSS = "lambda model, batch: model(**batch).loss"


def own_loop_lines(ladder: Ladder, recipe: Path, clip_is_theirs: bool) -> list[str]:
    """Return what to write: lines of Python, and what they stand for.

    `clip_is_theirs`: the user or their script has said how gradients are clipped; else it was only
    the default of the measurement, which is told and not written into their loop. Nothing for
    built-in models, which `train` trains, for steps without an update, and for a script that has
    the winner already.
    """
    spec = ladder.spec
    if ":" not in spec.workload or spec.mode != "full" or ladder.has_winner_already:
        return []
    file = str(recipe.absolute())  # the loop may run in another folder
    is_hf = spec.workload.startswith(HUGGING_FACE)
    given = "" if is_hf else "loss(model, batch) returns your loss and "
    clip = f", clip={spec.clip:.12g}" if spec.clip and clip_is_theirs else ""
    loss = HF_LOSS if is_hf else "loss"
    lines = [
        f"in your own loop, where {given}optimizer(model, **how) makes your optimizer:",
        *(["  import itertools"] if spec.accumulate > 1 else []),
        f"  step = steplab.optimize(model, {loss}, {file!r}, optimizer{clip})",
        *_loop(spec.accumulate),
        f"  instead of what your loop has of {_replaced(ladder, bool(clip))}",
    ]
    if spec.clip and not clip_is_theirs:
        lines.append(
            f"  it was tuned with gradients clipped to the norm {spec.clip:g}, the default: if "
            "your loop clips, add clip=NORM instead of clip_grad_norm_; else tune with --clip 0"
        )
    if is_hf:
        lines.append(
            f"in the Trainer: class MyTrainer(RecipeMixin, Trainer): recipe = {file!r}, "
            "with RecipeMixin of steplab.adapters.transformers_trainer"
        )
    return lines


def _loop(accumulate: int) -> list[str]:
    if accumulate == 1:
        return [
            "  for batch in step.batches(loader):",
            "      output = step([batch])  # the loss is output.loss",
        ]
    return [
        "  batches = step.batches(loader)",
        f"  while micro_batches := list(itertools.islice(batches, {accumulate})):",
        "      output = step(micro_batches)  # the loss is output.loss, their mean",
    ]


def _replaced(ladder: Ladder, has_clip: bool) -> str:
    """Return what the lines stand for: "torch.compile, backward() and zero_grad()"."""
    names = dict.fromkeys((*USUAL, *ladder.winner.techniques))
    words = [word for name in names for word in technique(name).replaces]
    words += ["backward()", "clip_grad_norm_"] if has_clip else ["backward()"]
    return f"{', '.join([*words, 'optimizer.step()'])} and zero_grad()"

"""Techniques that must never pass the gate, and honest ones that must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from steplab.core import Recipe, RunSpec
from steplab.techniques.technique import Stage, StepParts, Technique
from steplab.verify.judge import judge
from steplab.verify.numerics import take_snapshot
from steplab.verify.references import compute_reference, step_without_dropout
from steplab.verify.shapes import GateShape, references_of
from tests.own_models import named


@dataclass(frozen=True)
class PlantedSettings:
    how: str = "planted"


class Planted(Technique):
    """Applies any function to the parts."""

    summary = "for tests"
    stage = Stage.IMPLEMENTATION
    settings: ClassVar[type] = PlantedSettings

    def __init__(self, change: Callable[[StepParts], None]) -> None:
        self.change = change

    def apply(self, parts: StepParts, settings: Any) -> None:
        self.change(parts)


PLANTED = Recipe({"planted": {"how": "planted"}})


def plant(monkeypatch, change: Callable[[StepParts], None]) -> None:
    """Let the recipe PLANTED apply `change`, in this process."""
    from steplab.techniques import recipes

    known = recipes.technique

    def technique(name: str) -> Technique:
        return Planted(change) if name == "planted" else known(name)

    monkeypatch.setattr(recipes, "technique", technique)
    monkeypatch.setattr("steplab.step.assemble.technique", technique)


def verdicts(spec) -> dict[str, tuple[bool, str]]:
    """Hold the recipe of `spec` against the truth; group -> (passed, detail)."""
    shape = GateShape("own", "", spec)
    truth = compute_reference(shape, "fp64")
    snapshot = take_snapshot(step_without_dropout(spec), spec)
    peers = [compute_reference(shape, name) for name in references_of(snapshot.rounding)]
    found = judge(snapshot, peers, truth, "")
    return {check.name: (check.passed, check.detail) for check in found}


def planted_spec(make, **changes):
    """Return the fixture's spec with the recipe PLANTED."""
    return replace(make(**changes), recipe=PLANTED)


def wrong_scaling(parts: StepParts) -> None:
    """A kernel that forgets the root: queries and keys of width D are divided by D."""
    for module in parts.model.modules():
        if getattr(module, "op", "") == "attention":
            before = module.forward

            def forward(q, *rest, run=before, **options):
                return run(q * q.shape[-1] ** -0.5, *rest, **options)

            module.forward = forward


def dropped_gradient(parts: StepParts) -> None:
    """One small parameter gets no gradient."""
    _, parameter = min(parts.model.named_parameters(), key=lambda pair: pair[1].numel())
    parameter.register_hook(torch.zeros_like)


def no_gradient_at_all(parts: StepParts) -> None:
    """A parameter that autograd is told to leave alone."""
    next(p for p in parts.model.parameters() if p.ndim == 2).requires_grad_(False)


def unscaled_init(parts: StepParts) -> None:
    """Stacked experts, or any matrix, initialized without regard to their width."""
    for name, p in parts.model.named_parameters():
        if "experts" in name or "up" in name:
            nn.init.normal_(p)


def every_other_update(parts: StepParts) -> None:
    """Looks faster because it updates, and so waits for the gradients, only half as often."""
    calls = []

    def wrap(step):
        def sometimes(*args):
            calls.append(1)
            return step(*args) if len(calls) % 2 else None

        return sometimes

    parts.wrap_optimizer_step = wrap


def late_update(parts: StepParts) -> None:
    """Each update is put off until the next step, when somebody else's time is measured."""
    waiting: list[list[torch.Tensor]] = []

    def wrap(step):
        parameters = list(parts.model.parameters())

        def postponed(*args):
            now = [p.grad for p in parameters]
            if waiting:
                for p, gradient in zip(parameters, waiting.pop(), strict=True):
                    p.grad = gradient
                step(*args)
            waiting.append(now)

        return postponed

    parts.wrap_optimizer_step = wrap


def half_the_batch(parts: StepParts) -> None:
    """Looks at every second sequence only."""
    forward = parts.model.forward
    parts.model.forward = lambda *tensors: forward(*(t[::2] for t in tensors))


def rounded_too_far(parts: StepParts) -> None:
    """Says fp32 and multiplies in bf16."""
    parts.forward_context = lambda: torch.autocast("cpu", dtype=torch.bfloat16)


BAD = [
    wrong_scaling,
    dropped_gradient,
    no_gradient_at_all,
    unscaled_init,
    every_other_update,
    late_update,
    half_the_batch,
    rounded_too_far,
]


def own_file(folder: Path, model: str, loss: str = "m(x).square().mean()") -> RunSpec:
    """Write a model of one's own with inputs `x` of width 8, and return its spec."""
    path = folder / "own.py"
    path.write_text(
        "import torch, steplab\n"
        "from torch import nn\n"
        "def factory(width: int = 8):\n"
        "    def batches(size):\n"
        "        while True:\n"
        "            yield torch.randn(size, width)\n"
        f"    return steplab.UserModel({model}, batches, lambda m, x: {loss})\n"
    )
    return RunSpec(named(f"{path}:factory"), {"width": 8})

"""Which way of sharing a step is best: schemes x experts x batches x checkpointing on N ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from steplab.core import Recipe, RunSpec, Setting, Settings, units
from steplab.core.errors import SteplabError, UserError
from steplab.core.prediction import Prediction
from steplab.estimate.cluster import Cluster
from steplab.estimate.kernels import KernelTimes
from steplab.estimate.predict import StepCounts, largest_batch, predict
from steplab.hardware.catalog import Card
from steplab.techniques.recipes import PARALLEL, alone, check_recipe

SCHEMES = ("bucket", "zero1", "fsdp")
HOURS = 3_600_000.0  # milliseconds


@dataclass(frozen=True)
class Budget:
    """What a training is to see, and what a GPU costs."""

    tokens: float | None = None
    price: float | None = None  # per GPU-hour

    def hours(self, prediction: Prediction) -> float | None:
        """Return how long the training takes."""
        if self.tokens is None:
            return None
        return self.tokens / prediction.tokens * prediction.step_ms / HOURS

    def cost(self, prediction: Prediction) -> float | None:
        """Return what all ranks cost for so long."""
        hours = self.hours(prediction)
        if hours is None or self.price is None:
            return None
        return hours * prediction.spec.ranks * self.price


def candidates(spec: RunSpec, ranks: int, experts: int) -> Iterator[RunSpec]:
    """Yield the recipes to consider; `experts` is how many a layer has, 0 for none."""
    degrees = [d for d in (1, 2, 4, 8) if d == 1 or (experts and experts % d == 0 == ranks % d)]
    for checkpointing in (False, True):
        techniques: dict[str, Settings] = {
            k: v for k, v in spec.recipe.techniques.items() if k != "checkpointing"
        }
        if checkpointing:
            techniques["checkpointing"] = {"how": "blocks"}
        if ranks == 1:
            yield replace(spec, recipe=alone(Recipe(techniques)), ranks=1)
            continue
        for scheme in SCHEMES:
            for degree in degrees if scheme != "zero1" else (1,):
                how: dict[str, Setting] = {"data": scheme}
                if degree > 1:
                    how["expert"] = degree
                shared = {**techniques, PARALLEL: how}
                shared.pop("cuda_graph", None)
                yield replace(spec, recipe=Recipe(shared), ranks=ranks)


def search(
    spec: RunSpec,
    ranks: Sequence[int],
    experts: int,
    card: Card,
    times: KernelTimes,
    cluster: Cluster,
    progress: Callable[[str], None],
) -> list[Prediction]:
    """Return what fits, the fastest per token first; every recipe with its largest batch too."""
    found: list[Prediction] = []
    for count in ranks:
        for candidate in candidates(spec, count, experts):
            try:
                check_recipe(candidate.recipe)
                progress(f"{units.counted(count, 'rank')}: {candidate.recipe}")
                counts = StepCounts(candidate, card, times)
                most = largest_batch(counts)
            except SteplabError:  # does not go together, or not even one sequence fits
                continue
            for batch in sorted({min(spec.batch, most), most}):
                found.append(predict(counts, cluster, batch))
    if not found:
        raise UserError(
            f"No plan fits: {spec.title} needs more memory than a {card.name} has, in every way "
            "of sharing it.",
            "Give more --ranks, or take a smaller --size.",
        )
    return sorted((p for p in found if p.fits), key=lambda p: p.step_ms / p.tokens)


def frontier(predictions: Sequence[Prediction], budget: Budget) -> list[Prediction]:
    """Return those than which no other is both faster and cheaper, the fastest first."""

    def both(p: Prediction) -> tuple[float, float]:
        time = p.step_ms / p.tokens
        return time, time * p.spec.ranks

    return [
        p
        for p in predictions
        if not any(
            both(q)[0] <= both(p)[0] and both(q)[1] <= both(p)[1] and both(q) != both(p)
            for q in predictions
        )
    ]

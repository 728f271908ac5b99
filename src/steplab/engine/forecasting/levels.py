"""Quantile levels: those asked for among those that a model has. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.errors import UserError


def choose_levels(
    asked: Sequence[float] | None, trained: Sequence[float]
) -> tuple[tuple[float, ...], list[int]]:
    """Return (levels from low to high, their places among the trained ones); all if none asked."""
    if asked is None:
        return tuple(trained), list(range(len(trained)))
    wanted = sorted(set(asked))
    if wanted and not trained:
        raise UserError(
            "This is a point model: it has no quantiles.",
            "Leave them out, or train with quantiles: steplab train --quantiles 0.1,0.5,0.9",
        )
    unknown = [level for level in wanted if level not in trained]
    if unknown:
        known = ", ".join(f"{level:g}" for level in trained)
        raise UserError(
            f"The model has no quantile {', '.join(f'{level:g}' for level in unknown)}.",
            f"It was trained for {known}.",
        )
    return tuple(wanted), [list(trained).index(level) for level in wanted]

"""Which heads make a horizon, and how much of the past each pass over the model sees. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from steplab.core.errors import Unsupported, UserError, did_you_mean

HeadRule = Literal["largest", "next-larger"]


class HeadSlice(NamedTuple):
    """The first `points` points of the head whose outputs begin at `offset`."""

    offset: int
    points: int


@dataclass(frozen=True)
class DecodePass:
    """Heads that are read one after another; each but the last one feeds its points back.

    `context` is how many points of the past the first of them may see: with all that is fed
    back, no token stands beyond the positions that were trained.
    """

    takes: tuple[HeadSlice, ...]
    context: int


def choose_heads(
    horizon: int, heads: Sequence[int], patch_length: int, rule: HeadRule
) -> tuple[HeadSlice, ...]:
    """Return the heads whose points make up `horizon`.

    `largest`: the longest head that is not longer than what remains. `next-larger`: the shortest
    head that covers what remains, if there is one. Points that are fed back must make whole
    tokens; a head that is longer than what remains is cut.
    """
    if horizon < 1:
        raise UserError(f"The horizon must be at least 1 point, not {horizon}.")
    if rule not in get_args(HeadRule):
        raise UserError(f"head is {rule!r}.", did_you_mean(str(rule), get_args(HeadRule)))
    takes = []
    while horizon > 0:
        takes.append(_next_head(horizon, heads, patch_length, rule))
        horizon -= takes[-1].points
    return tuple(takes)


def plan_passes(takes: Sequence[HeadSlice], trained: int) -> tuple[DecodePass, ...]:
    """Divide the heads into passes; `trained` is the points of a training window.

    A pass ends when the points it feeds back would fill more than half of the window, so that
    half of it is always left for the past. The cut depends on the horizon alone: a series'
    forecast does not depend on the others in its batch.
    """
    passes: list[DecodePass] = []
    members: list[HeadSlice] = []
    for take in takes:
        if sum(one.points for one in members) > trained // 2:
            passes.append(_close(members, trained))
            members = []
        members.append(take)
    return (*passes, _close(members, trained))


def _close(takes: Sequence[HeadSlice], trained: int) -> DecodePass:
    return DecodePass(tuple(takes), trained - sum(take.points for take in takes[:-1]))


def _next_head(
    remaining: int, heads: Sequence[int], patch_length: int, rule: HeadRule
) -> HeadSlice:
    covering = [h for h in heads if h >= remaining]
    inner = [h for h in heads if h <= remaining and (h == remaining or h % patch_length == 0)]
    if covering and (rule == "next-larger" or not inner):
        chosen = min(covering)
    elif inner:
        chosen = max(inner)
    else:
        raise Unsupported(
            f"None of the heads ({', '.join(map(str, heads))} points) makes whole tokens of "
            f"{patch_length} points, so this model forecasts at most {max(heads)} points."
        )
    return HeadSlice(sum(heads[: list(heads).index(chosen)]), min(chosen, remaining))

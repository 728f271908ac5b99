"""From contexts to forecasts: read a head, append its points, until the horizon is full."""

# B batch, T points, H points of the horizon, Q quantiles
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from steplab.core.errors import Unsupported, UserError, did_you_mean
from steplab.forecasting.prediction import check_horizon
from steplab.modules.kv_cache import KVCache
from steplab.workloads.tsmoe.model import Forecast, Tsmoe

Feed = Callable[[Tensor, Tensor | None], Forecast]
HeadRule = Literal["largest", "next-larger"]


class HeadSlice(NamedTuple):
    """The first `points` points of the head whose outputs begin at `offset`."""

    offset: int
    points: int


@dataclass(frozen=True)
class DecodePass:
    """Heads that are read one after another; each but the last feeds its points back.

    `context` is how many points of the past the first of them may see: together with all points
    that are fed back, no token is beyond the positions that were trained.
    """

    heads: tuple[HeadSlice, ...]
    context: int


def choose_heads(
    horizon: int, heads: Sequence[int], patch_length: int, rule: HeadRule
) -> tuple[HeadSlice, ...]:
    """Return the heads whose points make up `horizon`.

    `largest` chosen the longest head that is not longer than what remains; `next-larger` chosen the
    shortest head that covers what remains, if there is one. Points that are fed back must make
    whole tokens; a head that is longer than what remains is cut.
    """
    check_horizon(horizon)
    if rule not in get_args(HeadRule):
        raise UserError(f"head is {rule!r}.", did_you_mean(str(rule), get_args(HeadRule)))
    chosen = []
    while horizon > 0:
        chosen.append(_next_head(horizon, heads, patch_length, rule))
        horizon -= chosen[-1].points
    return tuple(chosen)


def plan_passes(heads: Sequence[HeadSlice], trained: int) -> tuple[DecodePass, ...]:
    """Divide the heads into passes; `trained` is the length of a training window in points.

    A pass ends when the points it feeds back would fill more than half of the window, so that
    half of it is always left for the past. The division depends on the horizon alone: the forecast
    of a series does not depend on the others in its batch.
    """
    passes: list[DecodePass] = []
    members: list[HeadSlice] = []
    for head in heads:
        if sum(one.points for one in members) > trained // 2:
            passes.append(_pass(members, trained))
            members = []
        members.append(head)
    return (*passes, _pass(members, trained))


def _pass(heads: Sequence[HeadSlice], trained: int) -> DecodePass:
    return DecodePass(tuple(heads), trained - sum(head.points for head in heads[:-1]))


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


class Decoded(NamedTuple):
    """Forecasts in the scale of the contexts, on the model's device."""

    points_BH: Tensor
    quantiles_BHQ: Tensor | None


@torch.no_grad()
def decode(
    model: Tsmoe,
    values_BT: Tensor,
    documents_BT: Tensor | None,
    passes: Sequence[DecodePass],
    cached: bool = True,
) -> Decoded:
    """Return the forecasts that follow `values_BT`, which is padded on the left.

    `documents_BT` marks the padding by an id of its own; None if there is no padding. The points
    that are fed back are the point forecasts, also for a model with quantiles.
    """
    points: list[Tensor] = []
    quantiles: list[Tensor] = []
    for one in passes:
        window_BT = values_BT[:, -one.context :]
        inside_BT = None if documents_BT is None else documents_BT[:, -one.context :]
        fed = sum(head.points for head in one.heads[:-1])
        batch, seen = window_BT.shape
        feed: Feed = Cached(model, batch, seen + fed) if cached else Uncached(model)
        for head in one.heads:
            found_Bh, found_BhQ = _read(feed(window_BT, inside_BT), head)
            points.append(found_Bh)
            quantiles += [] if found_BhQ is None else [found_BhQ]
            window_BT, inside_BT = found_Bh.to(values_BT.dtype), None
            values_BT = torch.cat([values_BT, window_BT], 1)
        if documents_BT is not None:
            grown = values_BT.shape[1] - documents_BT.shape[1]
            last_Bt = documents_BT[:, -1:].expand(-1, grown)
            documents_BT = torch.cat([documents_BT, last_Bt], 1)
    return Decoded(torch.cat(points, 1), torch.cat(quantiles, 1) if quantiles else None)


def _read(forecast: Forecast, head: HeadSlice) -> tuple[Tensor, Tensor | None]:
    """Return (B, h) and (B, h, Q) of one head, as predicted after the last token."""
    points = slice(head.offset, head.offset + head.points)
    quantiles_BNHQ = forecast.quantiles_BNHQ
    last_BhQ = None if quantiles_BNHQ is None else quantiles_BNHQ[:, -1, points]
    return forecast.outputs_BNH[:, -1, points], last_BhQ


class Uncached:
    """The definition: the model reads all points again whenever some are appended."""

    def __init__(self, model: Tsmoe) -> None:
        self.model = model
        self.values: list[Tensor] = []
        self.documents: list[Tensor] = []

    def __call__(self, values_BT: Tensor, documents_BT: Tensor | None) -> Forecast:
        """Return predictions after all points so far."""
        self.values.append(values_BT)
        if documents_BT is not None:
            self.documents.append(documents_BT)
        elif self.documents:
            self.documents.append(self.documents[-1][:, -1:].expand(values_BT.shape))
        documents_BS = torch.cat(self.documents, 1) if self.documents else None
        forecast = self.model(torch.cat(self.values, 1), documents_BT=documents_BS)
        assert isinstance(forecast, Forecast)
        return forecast


class Cached:
    """The same result, with the keys and values of earlier points kept."""

    def __init__(self, model: Tsmoe, batch: int, points: int) -> None:
        self.model = model
        self.cache = KVCache.empty(model, batch, points // model.config.patch_length)

    def __call__(self, values_BT: Tensor, documents_BT: Tensor | None) -> Forecast:
        """Return predictions after the new points."""
        return self.model.extend(values_BT, self.cache, documents_BT)

"""From contexts to forecasts: read a head, append its points, until the horizon is full."""

# B batch, T points, H points of the horizon, Q quantiles
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from steplab.core.errors import Unsupported, UserError, did_you_mean
from steplab.forecasting.prediction import check_horizon
from steplab.modules.kv_cache import KVCache
from steplab.step.decode_step import DecodeGraphs, DecodeStep
from steplab.workloads.tsmoe.model import Forecast, Tsmoe

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

    `largest` takes the longest head that is not longer than what remains; `next-larger` the
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


class Feed(Protocol):
    """A model that is given points piece by piece and predicts what follows each piece."""

    def begin(self, rows: int, points: int) -> None:
        """Forget all points; up to `points` of each of `rows` series will come."""
        ...

    def __call__(self, values_BT: Tensor, documents_BT: Tensor | None) -> Outputs:
        """Return predictions after the new points; `documents_BT` comes with the first ones."""
        ...


class Outputs(NamedTuple):
    """Predictions of all heads side by side, after the last point."""

    points_BH: Tensor
    quantiles_BHQ: Tensor | None

    def read(self, head: HeadSlice) -> Outputs:
        """Return those of one head."""
        own = slice(head.offset, head.offset + head.points)
        quantiles_BHQ = None if self.quantiles_BHQ is None else self.quantiles_BHQ[:, own]
        return Outputs(self.points_BH[:, own], quantiles_BHQ)


@torch.no_grad()
def decode(
    feed: Feed, values_BT: Tensor, documents_BT: Tensor | None, passes: Sequence[DecodePass]
) -> Outputs:
    """Return the forecasts that follow `values_BT`, which is padded on the left.

    `documents_BT` marks the padding by an id of its own; None if there is no padding. The points
    that are fed back are the point forecasts, also for a model with quantiles. They are in the
    scale of the contexts, on the model's device.
    """
    rows, known = values_BT.shape
    horizon = sum(head.points for one in passes for head in one.heads)
    all_BT = F.pad(values_BT, (0, horizon))
    if documents_BT is not None:
        documents_BT = torch.cat([documents_BT, documents_BT[:, -1:].expand(-1, horizon)], 1)
    quantiles: list[Tensor] = []
    stop = known  # points so far
    for one in passes:
        new = slice(max(0, stop - one.context), stop)
        inside_BT = None if documents_BT is None else documents_BT[:, new]
        fed = sum(head.points for head in one.heads[:-1])
        feed.begin(rows, new.stop - new.start + fed)
        for head in one.heads:
            points_Bh, quantiles_BhQ = feed(all_BT[:, new], inside_BT).read(head)
            new, inside_BT = slice(stop, stop + head.points), None
            all_BT[:, new] = points_Bh
            quantiles += [] if quantiles_BhQ is None else [quantiles_BhQ]
            stop = new.stop
    return Outputs(all_BT[:, known:], torch.cat(quantiles, 1) if quantiles else None)


def _after_last(forecast: Forecast) -> Outputs:
    quantiles_BNHQ = forecast.quantiles_BNHQ
    last_BHQ = None if quantiles_BNHQ is None else quantiles_BNHQ[:, -1]
    return Outputs(forecast.outputs_BNH[:, -1], last_BHQ)


class Uncached:
    """The definition: the model reads all points again whenever some are appended."""

    def __init__(self, model: Tsmoe) -> None:
        self.model = model

    def begin(self, rows: int, points: int) -> None:
        """Forget all points."""
        self.values: list[Tensor] = []
        self.documents: list[Tensor] = []

    def __call__(self, values_BT: Tensor, documents_BT: Tensor | None) -> Outputs:
        """Return predictions after all points so far."""
        self.values.append(values_BT)
        if documents_BT is not None:
            self.documents.append(documents_BT)
        elif self.documents:
            self.documents.append(self.documents[-1][:, -1:].expand(values_BT.shape))
        documents_BS = torch.cat(self.documents, 1) if self.documents else None
        forecast = self.model(torch.cat(self.values, 1), documents_BT=documents_BS)
        assert isinstance(forecast, Forecast)
        return _after_last(forecast)


# Tokens by which the room of a cache grows, so that contexts of similar lengths share its graphs.
ROOM = 64


class Cached:
    """The same result, with the keys and values of earlier points kept.

    Points that are fed back are a step of its own for each number of them, replayed as a graph
    where `graphs` captures one; `warn` is told if that fails. Batches of one shape share cache and
    graphs; another shape drops them.
    """

    def __init__(
        self,
        model: Tsmoe,
        graphs: DecodeGraphs | None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model, self.graphs, self.warn = model, graphs, warn
        self.cache: KVCache | None = None
        self.steps: dict[int, DecodeStep] = {}  # by the points that are fed back
        self._is_first = True

    def begin(self, rows: int, points: int) -> None:
        """Make room, or reuse it."""
        room = -(-points // self.model.config.patch_length // ROOM) * ROOM
        if self.cache is None or self.cache.documents_BS.shape != (rows, room):
            self.cache, self.steps = None, {}  # freed before the new one is made
            self.cache = KVCache.empty(self.model, rows, room)
        self.cache.clear()
        self._is_first = True

    def __call__(self, values_BT: Tensor, documents_BT: Tensor | None) -> Outputs:
        """Return predictions after the new points."""
        assert self.cache is not None
        if self._is_first:
            self._is_first = False
            return _after_last(self.model.extend(values_BT, self.cache, documents_BT))
        points = values_BT.shape[1]
        if points not in self.steps:
            self.steps[points] = DecodeStep(self._step, self.graphs, self.warn)
        outputs: Outputs = self.steps[points](values_BT.contiguous())
        return outputs

    def _step(self, values_BT: Tensor) -> Outputs:
        assert self.cache is not None
        return _after_last(self.model.extend(values_BT, self.cache.static))

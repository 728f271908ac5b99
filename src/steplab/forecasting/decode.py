"""From contexts to forecasts: read a head, append its points, go on until the horizon is full."""

# B batch, T points, H points of the horizon, Q quantiles
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from steplab.forecasting.plan import DecodePass, HeadSlice
from steplab.modules.kv_cache import KVCache
from steplab.workloads.tsmoe.model import Forecast, Tsmoe

Feed = Callable[[Tensor, Tensor | None], Forecast]


class Decoded(NamedTuple):
    """Forecasts in the scale of the contexts, on the model's device."""

    points_BH: Tensor
    quantiles_BHQ: Tensor | None


class Uncached:
    """The definition: the model sees all points anew whenever some are appended."""

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
    """The same, but keys and values of earlier points are kept."""

    def __init__(self, model: Tsmoe, batch: int, points: int) -> None:
        self.model = model
        self.cache = KVCache.empty(model, batch, points // model.config.patch_length)

    def __call__(self, values_BT: Tensor, documents_BT: Tensor | None) -> Forecast:
        """Return predictions after the new points."""
        return self.model.extend(values_BT, self.cache, documents_BT)


@torch.no_grad()
def decode(
    model: Tsmoe,
    values_BT: Tensor,
    documents_BT: Tensor | None,
    passes: Sequence[DecodePass],
    cached: bool = True,
) -> Decoded:
    """Return the forecasts that follow `values_BT`, which is padded on the left.

    `documents_BT` tells the padding from the series by another id; None: there is none. Points
    fed back are the point forecasts, also for a model with quantiles.
    """
    points: list[Tensor] = []
    quantiles: list[Tensor] = []
    for one in passes:
        window_BT = values_BT[:, -one.context :]
        inside_BT = None if documents_BT is None else documents_BT[:, -one.context :]
        fed = sum(take.points for take in one.takes[:-1])
        batch, seen = window_BT.shape
        feed: Feed = Cached(model, batch, seen + fed) if cached else Uncached(model)
        for take in one.takes:
            found_Bh, found_BhQ = _read(feed(window_BT, inside_BT), take)
            points.append(found_Bh)
            quantiles += [] if found_BhQ is None else [found_BhQ]
            window_BT, inside_BT = found_Bh.to(values_BT.dtype), None
            values_BT = torch.cat([values_BT, window_BT], 1)
        if documents_BT is not None:
            grown = values_BT.shape[1] - documents_BT.shape[1]
            last_Bt = documents_BT[:, -1:].expand(-1, grown)
            documents_BT = torch.cat([documents_BT, last_Bt], 1)
    return Decoded(torch.cat(points, 1), torch.cat(quantiles, 1) if quantiles else None)


def _read(forecast: Forecast, take: HeadSlice) -> tuple[Tensor, Tensor | None]:
    """Return (B, points) and (B, points, Q) of one head, as predicted after the last token."""
    places = slice(take.offset, take.offset + take.points)
    quantiles_BNHQ = forecast.quantiles_BNHQ
    last_BhQ = None if quantiles_BNHQ is None else quantiles_BNHQ[:, -1, places]
    return forecast.outputs_BNH[:, -1, places], last_BhQ

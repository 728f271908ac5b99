"""All contexts through the model: batch by batch, the results in the order of the contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steplab.core.errors import MeasurementError, Unsupported
from steplab.forecasting.contexts import Scaled, Series, scale, usable_part
from steplab.forecasting.decode import Decoded, decode
from steplab.forecasting.plan import DecodePass
from steplab.forecasting.prediction import Prediction
from steplab.train.pretrained import ForwardContext
from steplab.workloads.tsmoe.model import Tsmoe


def length_batches(
    lengths: Sequence[int], most_series: int, most_points: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the numbers of the series of each batch, shortest first.

    A batch has at most `most_series` series, and at most `most_points` points with its padding
    unless one series alone has more. So a batch is as long as its last series, and the padding
    is only the difference between neighbours in order of length.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    start = 0
    while start < len(order):
        stop = start + 1
        while (
            stop < len(order)
            and stop - start < most_series
            and (stop - start + 1) * lengths[order[stop]] <= most_points
        ):
            stop += 1
        yield order[start:stop]
        start = stop


# B series of a batch, T points, H points of the horizon, Q quantiles


Progress = Callable[[int], None]
PADDING, SERIES = 0, 1  # document ids
# Points of a batch, padding included. On a CPU more of them leave the caches (tiny model, contexts
# of 512, CPU time of one core: 88 series/s with 2**13, 55 with 2**15); a GPU has memory to spare.
MAX_BATCH_POINTS, MAX_BATCH_POINTS_CPU = 2**18, 2**13


class PendingBatch(NamedTuple):
    """Some series on their way through the model."""

    numbers_B: NDArray[np.int64]  # which of the contexts
    scaled: list[Scaled]
    decoded: Decoded


def forecast_batches(
    model: Tsmoe,
    forward_context: ForwardContext,
    series: Sequence[Series],
    names: Sequence[Any],
    passes: Sequence[DecodePass],
    batch: int,
    cached: bool,
    progress: Progress | None,
) -> Prediction:
    """Forecast all series; `names` are for messages."""
    patch = model.config.patch_length
    most = passes[0].context
    parts = [usable_part(one, most, repr(n)) for one, n in zip(series, names, strict=True)]
    parts = [_whole_tokens(part, patch) for part in parts]
    device = next(model.parameters()).device
    horizon = sum(take.points for one in passes for take in one.takes)
    levels = model.config.quantile_levels
    mean_BH = np.empty((len(parts), horizon))
    quantiles_BHQ = np.empty((len(parts), horizon, len(levels))) if levels else None
    into = Prediction(mean_BH, quantiles_BHQ, levels)
    waiting: PendingBatch | None = None  # a GPU works on one batch while the next one is made
    most_points = MAX_BATCH_POINTS_CPU if device.type == "cpu" else MAX_BATCH_POINTS
    for numbers_B in length_batches([len(part) for part in parts], batch, most_points):
        scaled = [scale(parts[number]) for number in numbers_B]
        values_BT, documents_BT = pad_batch(scaled, model)
        try:
            with forward_context():
                decoded = decode(model, values_BT, documents_BT, passes, cached)
        except torch.OutOfMemoryError as error:
            raise Unsupported(
                f"Out of memory with {len(scaled)} series at a time ({str(error).split('. ')[0]}).",
                "Use a smaller --batch.",
            ) from None
        _collect(waiting, into, progress)
        waiting = PendingBatch(numbers_B, scaled, decoded)
    _collect(waiting, into, progress)
    _check_finite(into, names)
    return into


def pad_batch(scaled: Sequence[Scaled], model: Tsmoe) -> tuple[Tensor, Tensor | None]:
    """Return (values_BT padded on the left, documents_BT or None where nothing is padded)."""
    weight = next(model.parameters())
    longest = max(len(one.values) for one in scaled)
    values = np.zeros((len(scaled), longest))
    documents = np.full((len(scaled), longest), PADDING, np.int32)
    for row, one in enumerate(scaled):
        values[row, longest - len(one.values) :] = one.values
        documents[row, longest - len(one.values) :] = SERIES
    values_BT = torch.from_numpy(values).to(weight.dtype)
    ragged = bool((documents[:, 0] == PADDING).any())
    documents_BT = torch.from_numpy(documents) if ragged else None
    if weight.device.type == "cpu":
        return values_BT, documents_BT
    on_device = [
        None if x is None else x.pin_memory().to(weight.device, non_blocking=True)
        for x in (values_BT, documents_BT)
    ]
    assert on_device[0] is not None
    return on_device[0], on_device[1]


def _whole_tokens(part: Series, patch: int) -> Series:
    """Put missing points in front, so that the first token is whole too."""
    missing = -len(part) % patch
    return np.concatenate([np.full(missing, np.nan), part]) if missing else part


def _collect(batch: PendingBatch | None, into: Prediction, progress: Progress | None) -> None:
    """Copy a batch's results to their places, in the units of the series."""
    if batch is None:
        return
    points_BH, quantiles_BHQ = (
        None if x is None else x.double().cpu().numpy() for x in batch.decoded
    )
    assert points_BH is not None
    for row, (number, scaled) in enumerate(zip(batch.numbers_B, batch.scaled, strict=True)):
        into.mean_BH[number] = scaled.undo(points_BH[row])
        if into.quantiles_BHQ is not None and quantiles_BHQ is not None:
            into.quantiles_BHQ[number] = scaled.undo(quantiles_BHQ[row])
    if progress is not None:
        progress(len(batch.scaled))


def _check_finite(found: Prediction, names: Sequence[Any]) -> None:
    sound_B = np.isfinite(found.mean_BH).all(1)
    if found.quantiles_BHQ is not None:
        sound_B &= np.isfinite(found.quantiles_BHQ).all((1, 2))
    if not sound_B.all():
        first = names[int(np.argmin(sound_B))]
        raise MeasurementError(
            f"The forecasts of {int((~sound_B).sum()):,} series are not finite (first: {first!r}).",
            "Use the recipe plain, or another checkpoint.",
        )

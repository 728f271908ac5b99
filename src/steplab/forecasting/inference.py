"""Batched inference: all contexts through the model, results in the order of the contexts."""

# B series of a batch, T points, H points of the horizon, Q quantiles
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steplab.core.errors import MeasurementError, Unsupported
from steplab.core.input_file import check_memory
from steplab.forecasting.contexts import ScaledContext, Series, scale_context, usable_part
from steplab.forecasting.decode import Cached, DecodePass, Outputs, Uncached, decode
from steplab.forecasting.prediction import Prediction
from steplab.step.decode_step import graphs_on
from steplab.train.pretrained import ForwardContext
from steplab.workloads.tsmoe.model import Tsmoe

Progress = Callable[[int], None]
PADDING, SERIES = 0, 1  # document ids
# Points of a batch, padding included. On a CPU, more of them do not fit the caches (tiny model,
# contexts of 512, one core: 88 series/s with 2**13, 55 with 2**15); a GPU has memory to spare.
MAX_BATCH_POINTS, MAX_BATCH_POINTS_CPU = 2**18, 2**13


def forecast_batches(
    model: Tsmoe,
    forward_context: ForwardContext,
    series: Sequence[Series],
    names: Sequence[Any],
    passes: Sequence[DecodePass],
    batch: int,
    cached: bool,
    progress: Progress | None,
    warn: Callable[[str], None],
) -> Prediction:
    """Forecast all series; `names` are for messages, `warn` is told what could be faster."""
    patch = model.config.patch_length
    longest = passes[0].context
    parts = [usable_part(one, longest, repr(n)) for one, n in zip(series, names, strict=True)]
    parts = [_whole_tokens(part, patch) for part in parts]
    device = next(model.parameters()).device
    horizon = sum(head.points for one in passes for head in one.heads)
    levels = model.config.quantile_levels
    check_memory(8 * len(parts) * horizon * (1 + len(levels)), "The forecast")
    mean_BH = np.empty((len(parts), horizon))
    quantiles_BHQ = np.empty((len(parts), horizon, len(levels))) if levels else None
    into = Prediction(mean_BH, quantiles_BHQ, levels)
    waiting: PendingBatch | None = None  # a GPU computes one batch while the next one is made
    max_points = MAX_BATCH_POINTS_CPU if device.type == "cpu" else MAX_BATCH_POINTS
    feed = Cached(model, graphs_on(device), warn) if cached else Uncached(model)
    with forward_context():  # once: autocast drops the weights it has cast, which graphs read
        for numbers_B in length_batches([len(part) for part in parts], batch, max_points):
            scaled = [scale_context(parts[number]) for number in numbers_B]
            values_BT, documents_BT = pad_batch(scaled, model)
            try:
                decoded = decode(feed, values_BT, documents_BT, passes)
            except torch.OutOfMemoryError as error:
                cause = str(error).split(". ")[0]
                raise Unsupported(
                    f"Out of memory with {len(scaled)} series at a time ({cause}).",
                    "Use a smaller --batch.",
                ) from None
            _collect(waiting, into, progress)
            waiting = PendingBatch(numbers_B, scaled, decoded)
    _collect(waiting, into, progress)
    _check_finite(into, names)
    return into


class PendingBatch(NamedTuple):
    """Series whose forecasts the device may still be computing."""

    numbers_B: NDArray[np.int64]  # which of the contexts
    scaled: list[ScaledContext]
    decoded: Outputs


def length_batches(
    lengths: Sequence[int], max_series: int, max_points: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the numbers of the series in each batch, shortest first.

    A batch has at most `max_series` series, and at most `max_points` points with its padding,
    unless one series alone has more. Sorted by length, series of a batch need little padding.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    start = 0
    while start < len(order):
        stop = start + 1
        while (
            stop < len(order)
            and stop - start < max_series
            and (stop - start + 1) * lengths[order[stop]] <= max_points
        ):
            stop += 1
        yield order[start:stop]
        start = stop


def pad_batch(scaled: Sequence[ScaledContext], model: Tsmoe) -> tuple[Tensor, Tensor | None]:
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
    """Put missing points in front so that the first token is whole too."""
    missing = -len(part) % patch
    return np.concatenate([np.full(missing, np.nan), part]) if missing else part


def _collect(batch: PendingBatch | None, into: Prediction, progress: Progress | None) -> None:
    """Copy the results of a batch into the prediction, in the units of the series."""
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

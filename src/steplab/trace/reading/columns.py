"""Columns: decoded events of one kind to arrays, one function per table of a Trace."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steplab.trace.events import COPY, FILL, KERNEL, Ints
from steplab.trace.reading.arguments import CallArgs, DeviceArgs, MemoryArgs, OpArgs, decode_args
from steplab.trace.reading.decode import Instant, Place, Span
from steplab.trace.reading.interning import JsonTexts, Texts, Threads
from steplab.trace.reading.nanoseconds import nanoseconds

DEVICE_KINDS = {
    "kernel": KERNEL,
    "Kernel": KERNEL,
    "gpu_memcpy": COPY,
    "Memcpy": COPY,
    "gpu_memset": FILL,
    "Memset": FILL,
}

Columns = tuple[NDArray[np.generic], ...]


class ColumnMaker:
    """Makes columns in the order of the fields of `steplab.trace.events`."""

    def __init__(self) -> None:
        self.texts = Texts()
        self.threads = Threads()
        self._values = JsonTexts(self.texts)

    def spans(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Spans."""
        return self._spans(spans, [(span.pid, span.tid) for span in spans])

    def ops(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Ops."""
        args = decode_args(spans, OpArgs)
        return (
            *self.spans(spans),
            integers([one.sequence for one in args]),
            integers([one.forward_thread for one in args]),
            self._values.codes([one.shapes or one.early_shapes for one in args]),
            self._values.codes([one.strides for one in args]),
            self._values.codes([one.dtypes for one in args]),
            self._values.codes([one.values for one in args]),
        )

    def calls(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Calls."""
        args = decode_args(spans, CallArgs)
        return *self.spans(spans), integers([one.correlation for one in args])

    def device(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Device."""
        args = decode_args(spans, DeviceArgs)
        places = [
            (
                span.pid if one.device is None else one.device,
                span.tid if one.stream is None else one.stream,
            )
            for span, one in zip(spans, args, strict=True)
        ]
        return (
            *self._spans(spans, places),
            np.array([DEVICE_KINDS[span.cat] for span in spans], np.int8),
            np.array([_number(device) for device, _ in places], np.int32),
            integers([one.correlation for one in args]),
            integers([one.bytes for one in args]),
            integers([one.graph for one in args]),
            integers([math.prod(one.grid) for one in args]),
        )

    def memory(self, instants: Sequence[Instant]) -> Columns:
        """Return the columns of MemoryEvents."""
        args = decode_args(instants, MemoryArgs)
        return (
            nanoseconds([instant.ts for instant in instants]),
            integers([one.bytes for one in args]),
            integers([one.address for one in args]),
            integers([one.allocated for one in args]),
            np.array([one.device_type != 0 for one in args], np.bool_),
        )

    def _spans(self, spans: Sequence[Span], places: Sequence[tuple[Place, Place]]) -> Columns:
        return (
            nanoseconds([span.ts for span in spans]),
            nanoseconds([span.dur for span in spans]),
            self.texts.codes([span.name for span in spans]),
            self.threads.codes(places),
        )


def integers(values: Sequence[int]) -> Ints:
    """Return 64-bit integers; larger ones, such as unsigned addresses, wrap around."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([(value + 2**63) % 2**64 - 2**63 for value in values], np.int64)


def _number(device: Place) -> int:
    return device if isinstance(device, int) else 0

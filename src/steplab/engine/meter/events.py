"""Moments of a training loop: noted without waiting for the device, read once they have passed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from steplab.errors import Unsupported, UserError


class DeviceEvent(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:
        """Queue the event behind what `stream` has been given so far."""
        ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`; both must have passed."""
        ...


class Moment(NamedTuple):
    """One moment on the host's clock (seconds) and, on CUDA, in a stream of the device."""

    host_s: float
    event: DeviceEvent | None
    stream: int = 0  # address of the stream

    @property
    def passed(self) -> bool:
        """Whether the device has come this far; always true on CPU."""
        return self.event is None or self.event.query()

    def host_ms_to(self, later: Moment) -> float:
        """Milliseconds until `later` on the host's clock."""
        return (later.host_s - self.host_s) * 1e3

    def device_ms_to(self, later: Moment) -> float:
        """Milliseconds until `later` on the device, which must have passed (CPU: the host's)."""
        if self.event is None or later.event is None:
            return self.host_ms_to(later)
        return self.event.elapsed_time(later.event)


class Marker:
    """Notes moments on one device. CUDA events are taken from a pool and given back to it.

    Streams are looked up by their address: making a Stream object for every event would cost as
    much as recording it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._new_event: Callable[..., DeviceEvent] = torch.cuda.Event
        self._free: list[DeviceEvent] = []
        self._streams: dict[int, torch.cuda.Stream] = {}
        if self.on_cuda:
            self._index = torch.cuda.current_device() if device.index is None else device.index

    def mark(self) -> Moment:
        """Note the present moment."""
        host_s = perf_counter()
        if not self.on_cuda:
            return Moment(host_s, None)
        event = self._free.pop() if self._free else self._new_event(enable_timing=True)
        # The model's device need not be the current one, whose stream is the default here.
        address = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = torch.cuda.current_stream(self.device)
        event.record(stream)
        return Moment(host_s, event, address)

    def give_back(self, moment: Moment) -> None:
        """Let the moment's event be used again; nobody may read the moment afterwards."""
        if moment.event is not None:
            self._free.append(moment.event)

    def synchronise(self) -> None:
        """Wait until every moment has passed."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


class MarkedStep:
    """The moments of one step: `start` and `end` of its period, and of every phase entered."""

    __slots__ = ("end", "entry_s", "from_entry", "phases", "start", "tokens", "wait_s")

    def __init__(
        self, tokens: int, start: Moment, entry_s: float, wait_s: float, from_entry: bool
    ) -> None:
        self.tokens = tokens
        self.start = start
        self.end = start
        self.entry_s = entry_s
        self.wait_s = wait_s  # between the last step and this one
        self.from_entry = from_entry  # no counted step ended before it: the period has no wait
        self.phases: list[tuple[str, Moment, Moment]] = []

    @property
    def passed(self) -> bool:
        """Whether all moments can be read; a phase may have ended on a stream of its own."""
        elsewhere = (end for _, _, end in self.phases if end.stream != self.end.stream)
        return self.end.passed and all(end.passed for end in elsewhere)


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's first parameter lives: a CPU or a CUDA device."""
    first = next(model.parameters(), None)
    if first is None:
        raise UserError("The model has no parameters, so its device cannot be told.")
    if first.device.type not in ("cpu", "cuda"):
        raise Unsupported(
            f"The Meter cannot time the device {first.device}.", "It knows cpu and cuda."
        )
    return first.device


def device_name(device: torch.device) -> str:
    """Return the GPU's name as its driver gives it; a CPU has no peak in the catalog."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"

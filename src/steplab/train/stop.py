"""How a signal ends a training: every rank finishes the same step, saves and ends."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist


@dataclass
class Stop:
    """Whether a signal has asked the loop to stop, and which one."""

    requested: bool = False
    signal: str = ""  # the first that came, by its name

    def ask(self, name: str) -> None:
        """Ask the loop to finish its step, save and end."""
        self.requested, self.signal = True, self.signal or name


def stop_signals() -> list[signal.Signals]:
    """Return the signals by which somebody asks a training to end, without those ignored."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if sys.platform != "win32":
        numbers.append(signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Turn SIGINT, SIGTERM and SIGHUP into `stop.requested`; a second SIGINT interrupts at once.

    The loop finishes its step, saves and ends. A signal that is ignored stays so: nohup ignores
    SIGHUP. Only the main thread receives signals: in any other thread nothing changes.
    """
    stop = Stop()
    interrupts = 0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        stop.ask(signal.Signals(number).name)
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        for number in before:
            signal.signal(number, ask)
        yield stop
    finally:
        for number, handler in before.items():
            # None: installed by C code, which Python cannot reinstall.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopVote:
    """Whether a signal has reached any rank, known to all of them before the same step.

    One small collective per step, which travels while the step computes: its result is read one
    step later.
    """

    def __init__(self) -> None:
        self.number = torch.zeros(1)  # of the signal; 0: none
        self.sent: dist.Work | None = None

    def take(self, stop: Stop) -> bool:
        """Send this rank's vote, and return whether any rank was to stop one step ago."""
        found = 0
        if self.sent is not None:
            self.sent.wait()
            found = int(self.number)
        own = signal.Signals[stop.signal] if stop.requested else 0
        self.number.fill_(own)
        self.sent = dist.all_reduce(self.number, dist.ReduceOp.MAX, async_op=True)
        if found and not stop.requested:
            stop.ask(signal.Signals(found).name)
        return found > 0

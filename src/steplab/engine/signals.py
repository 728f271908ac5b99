"""A signal asks the loop to stop; the loop finishes its step, saves and ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """Whether somebody asked to stop, and how."""

    requested: bool = False
    signal: str = ""  # SIGINT or SIGTERM, whichever came first


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """Turn SIGINT and SIGTERM into `stop.requested`; a second SIGINT interrupts at once.

    Only the main thread can receive signals: in any other one nothing is changed.
    """
    stop = Stop()
    interrupts = 0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        stop.requested, stop.signal = True, stop.signal or signal.Signals(number).name
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, ask)
        yield stop
    finally:
        for number, handler in before.items():
            # None: installed by C code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

"""Start N local ranks of one command by torch's elastic launcher, again after a failure.

Each start has a store of its own, held by this process: a new group never finds the addresses of
dead ranks, and the store outlives them all. Ranks tell of their own failures; this process tells
of ranks that were killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from torch.distributed.elastic.multiprocessing.api import RunProcsResult

from steplab.core.errors import MeasurementError, UserError
from steplab.parallel.environment import LAUNCHER
from steplab.train.stop import stop_signals

POLL_S = 0.2  # between two looks at the ranks
STORE_TIMEOUT = timedelta(seconds=60)
# What starting again would not change: a wrong request, a run that does not repeat itself, and
# ranks that have saved and ended because a signal asked them to.
FINAL_CODES = frozenset(
    {
        UserError.exit_code,
        MeasurementError.exit_code,
        128 + signal.SIGTERM,
        128 + signal.SIGINT,
        128 + signal.SIGPIPE,
    }
)


def launch(words: Sequence[str], ranks: int, max_restarts: int) -> int:
    """Run `python -m steplab WORDS` in `ranks` processes; return the exit code.

    After a failure all ranks are started again, up to `max_restarts` times. SIGTERM, SIGINT and
    SIGHUP are passed on to all ranks, which save and end; a second SIGINT kills them.
    """
    for attempt in range(max_restarts + 1):
        code = _run_group(words, ranks, attempt)
        if code == 0 or code in FINAL_CODES:
            return code
        if attempt < max_restarts:
            _say(f"restart {attempt + 1} of {max_restarts}.")
    return code


def _run_group(words: Sequence[str], ranks: int, attempt: int) -> int:
    """Start the ranks, wait until they end and return the exit code of them all."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False,
                          timeout=STORE_TIMEOUT)  # fmt: skip
    command = ("-m", "steplab", *words)
    with tempfile.TemporaryDirectory(prefix="steplab-ranks-") as folder:
        context = start_processes(
            name="rank",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(ranks), command),
            envs={rank: _variables(rank, ranks, store.port, attempt) for rank in range(ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        with _pass_on_signals(context):
            result = context.wait(period=POLL_S)
    assert result is not None  # it waits as long as it takes
    return _exit_code(result, ranks)


def _variables(rank: int, ranks: int, port: int, attempt: int) -> dict[str, str]:
    """Return what torchrun would set, for `parallel.environment` to read."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


@contextlib.contextmanager
def _pass_on_signals(context: PContext) -> Iterator[None]:
    """Send SIGTERM to every rank when this process is asked to end, and keep waiting for them.

    Ranks are in sessions of their own, so that Ctrl-C reaches this process alone.
    """
    interrupts = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        for process in context.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if interrupts > 1 else signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(result: RunProcsResult, ranks: int) -> int:
    """Tell of a rank that was killed, and return the code that explains the end of the group."""
    codes = [failure.exitcode for failure in result.failures.values()]  # the first failed first
    if not codes:
        return 0
    first = next(iter(result.failures))
    if codes[0] < 0:
        name = signal.Signals(-codes[0]).name
        _say(f"rank {first} of {ranks} on {socket.gethostname()} was killed by {name}.")
        return 128 - codes[0]
    # A rank that has lost another one ends with 1; the code of that other one says more.
    return next((code for code in codes if code > 1), codes[0])


def _say(line: str) -> None:
    print(f"steplab: {line}", file=sys.stderr, flush=True)

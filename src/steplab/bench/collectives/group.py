"""Run one job in a group of rank processes and report how every cell ended, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from steplab.bench.collectives.job import (
    FAILURE_FILE,
    JOB_FILE,
    LOG_FILE,
    OUTCOME_FILE,
    Collective,
    Job,
    Outcome,
)
from steplab.core.codec import decode, encode

LAUNCHER = "steplab.bench.collectives.launch"
# Rare enough not to disturb ranks that need every core.
POLL_S = 0.1
# Longer than the launcher gives its ranks before it kills them.
GRACE_S = 15.0


def run_job(job: Job) -> Iterator[Outcome]:
    """Yield one Outcome per cell of `job`, in order and as they come.

    The ranks are started together and all end before the last Outcome. When one crashes or the
    time is up, the outcomes of the current cell and all later ones say so.
    """
    with tempfile.TemporaryDirectory(prefix="steplab-") as name:
        folder = Path(name)
        (folder / JOB_FILE).write_text(json.dumps(encode(job)))
        (folder / OUTCOME_FILE).touch()
        reported = 0
        with _started(folder) as launcher:
            deadline = time.monotonic() + job.timeout_s
            for outcome in _follow(launcher, folder, deadline):
                reported += 1
                yield outcome
            code = launcher.poll()
        if reported < len(job.cells):
            yield from _unfinished(job, reported, folder, code)


@contextlib.contextmanager
def _started(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # What torchrun does: ranks that fill buffers with many threads would slow each other down.
    environment.setdefault("OMP_NUM_THREADS", "1")
    with (
        (folder / LOG_FILE).open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-P", "-m", LAUNCHER, str(folder)],
            stdin=subprocess.PIPE,  # closes when this process ends, which ends the group
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        ) as launcher,
    ):
        try:
            yield launcher
        finally:
            _end(launcher)


def _follow(launcher: subprocess.Popen[bytes], folder: Path, deadline: float) -> Iterator[Outcome]:
    with (folder / OUTCOME_FILE).open() as file:
        while True:
            # Asked before reading, so that the last lines of an ended group are not missed.
            over = launcher.poll() is not None or time.monotonic() > deadline
            for line in _complete_lines(file):
                yield decode(Outcome, json.loads(line), OUTCOME_FILE)
            if over:
                return
            time.sleep(POLL_S)


def _complete_lines(file: TextIO) -> Iterator[str]:
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(start)
            return
        yield line


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Leave no process of the group behind."""
    try:
        if launcher.poll() is None:
            _signal_group(launcher, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(GRACE_S)
    finally:
        _signal_group(launcher, signal.SIGKILL)


def _signal_group(launcher: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, number)


def _unfinished(job: Job, reported: int, folder: Path, code: int | None) -> Iterator[Outcome]:
    """Yield the Outcomes of the cell in work and those after it; no `code`: the time was up."""
    cell: Collective = job.cells[reported]
    if code is None:
        reason = f"{cell} had not finished {job.timeout_s:g} s after the start of the ranks"
        first = Outcome("timeout", reason)
    else:
        first = Outcome("crashed", f"in {cell}, {_cause(folder, code)}")
    yield first
    for _ in job.cells[reported + 1 :]:
        yield Outcome(first.status, f"not reached, because {cell} ended as {first.status}")


def _cause(folder: Path, code: int) -> str:
    failure = folder / FAILURE_FILE
    if failure.exists():
        return failure.read_text()
    if code < 0:
        return f"the launcher of the ranks ended by {signal.Signals(-code).name}"
    lines = (folder / LOG_FILE).read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing said")
    return f"the launcher of the ranks failed: {last[:300]}"

"""Trials in worker processes: out of memory, a crash or a time-out becomes a row with a status.

This side imports no torch, so the command line stays quick and holds no device memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import steplab
from steplab.core import Environment, Run, RunSpec, Samples, Status, new_run_id
from steplab.core.codec import decode, encode
from steplab.core.errors import ERROR_KINDS, MeasurementError, SteplabError
from steplab.core.run import now

Progress = Callable[[str], None]


def no_progress(text: str) -> None:
    """Show no progress."""


class WorkerLost(Exception):
    """The worker gave no answer: it died ("crashed") or took too long ("timeout")."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Worker:
    """A child process that assembles and measures steps."""

    program = "steplab.workers.program"  # the module that it runs

    def __init__(self) -> None:
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed below
        # A session of its own: Ctrl-C reaches the parent alone, which then ends the worker.
        self.process = subprocess.Popen(
            # -P: a queue.py in the working directory must not be taken for the library's.
            [sys.executable, "-P", "-m", self.program],
            env={**os.environ, "PYTHONPATH": _import_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.pending = b""

    def ask(self, request: dict[str, Any], timeout: float, progress: Progress = no_progress) -> Any:
        """Send a request and wait for its answer; raise WorkerLost or the worker's own error."""
        self.send(request)
        return self.receive(timeout, progress)

    def send(self, request: dict[str, Any]) -> None:
        """Send a request without waiting."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerLost("crashed", self._death()) from None

    def receive(self, timeout: float, progress: Progress = no_progress) -> Any:
        """Wait for the answer to the last request, `timeout` seconds at most."""
        deadline = monotonic() + timeout
        while True:
            message = self._next_message(deadline, timeout)
            if "progress" in message:
                progress(message["progress"])
            elif "error" in message:
                raise ERROR_KINDS[message["error"]](message["message"], message["suggestion"])
            else:
                return message["done"]

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.selector.close()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _next_message(self, deadline: float, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        while b"\n" not in self.pending:
            left = deadline - monotonic()
            if left <= 0 or not self.selector.select(left):
                raise WorkerLost("timeout", f"no answer within {timeout:.3g} s")
            chunk = self.process.stdout.read()
            if chunk == b"":
                raise WorkerLost("crashed", self._death())
            self.pending += chunk or b""
        line, self.pending = self.pending.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _death(self) -> str:
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            hint = ", often the system's out-of-memory killer" if -code == signal.SIGKILL else ""
            return f"the worker was ended by {name}{hint}"
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()]
        return f"the worker ended with code {code}: {lines[-1] if lines else 'no message'}"


def _import_path() -> str:
    """Let the worker import this very steplab, also from a bare source tree after a chdir."""
    own = str(Path(steplab.__file__).parents[1].resolve())
    return os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH", "")]))


class TrialRunner:
    """Runs trials one after another, keeping a worker as long as its results can be trusted.

    Trials with the same `key` share a worker, which saves its start; after any failure, and for
    another key, a fresh one is started.
    """

    def __init__(self, timeout: float = 600.0) -> None:
        self.timeout = timeout
        self.worker: Worker | None = None
        self.key = ""

    def environment(self) -> Environment:
        """Ask a worker what this machine is."""
        try:
            answer = self._worker("").ask({"do": "environment"}, self.timeout)
        except WorkerLost as lost:
            self._drop()
            raise MeasurementError(f"The worker process does not start: {lost.reason}.") from None
        found: Environment = decode(Environment, answer, "environment")
        return found

    def trial(
        self,
        spec: RunSpec,
        environment: Environment,
        key: str = "",
        progress: Progress = no_progress,
    ) -> Run:
        """Measure one spec; a worker that is lost becomes the Run's status."""
        try:
            request = {"do": "trial", "spec": encode(spec)}
            answer = self._worker(key).ask(request, self.timeout, progress)
            run: Run = decode(Run, answer, "run")
        except WorkerLost as lost:
            blank = Run(new_run_id(spec), spec, environment, created=now())
            run = replace(blank, status=lost.status, reason=lost.reason)
        except SteplabError:
            self._drop()
            raise
        if run.status != "ok":
            self._drop()
        return run

    def __enter__(self) -> TrialRunner:
        return self

    def __exit__(self, *exc: object) -> None:
        self._drop()

    def _worker(self, key: str) -> Worker:
        # The worker that answered `environment` has run nothing yet: any key may have it.
        if self.worker is None or (self.key and self.key != key):
            self._drop()
            self.worker = Worker()
        self.key = key
        return self.worker

    def _drop(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None
            self.key = ""


def alternate(
    first: RunSpec,
    second: RunSpec,
    rounds: int,
    timeout: float = 600.0,
    progress: Progress = no_progress,
) -> tuple[list[Samples], list[Samples]]:
    """Measure two specs in turns, both alive in a worker of their own, so drift cannot decide.

    Each round measures `spec.steps` steps of both, and the order flips from round to round.
    Returns the samples of every round; a worker that is lost, or that did not run what was asked
    for, is a MeasurementError.
    """
    measured: tuple[list[Samples], list[Samples]] = ([], [])
    try:
        with Worker() as one, Worker() as two:
            pairs = [(one, first), (two, second)]
            for worker, spec in pairs:
                progress(f"preparing {spec.recipe.label}")
                worker.ask({"do": "prepare", "spec": encode(spec)}, timeout)
            for number in range(rounds):
                progress(f"round {number + 1}/{rounds}")
                for index in (0, 1) if number % 2 == 0 else (1, 0):
                    worker, spec = pairs[index]
                    answer = worker.ask({"do": "measure", "steps": spec.steps}, timeout)
                    measured[index].append(decode(Samples, answer, "samples"))
            for worker, _ in pairs:
                worker.ask({"do": "verify"}, timeout)
    except WorkerLost as lost:
        raise MeasurementError(f"A worker was lost: {lost.reason}.") from None
    return measured

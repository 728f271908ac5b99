"""Worker: a child process that calls functions for its parent, who needs no torch.

    with Worker() as worker:
        run = worker.call("steplab.step.trial:trial", Run, timeout=600, spec=spec)

The command line never imports torch itself, so it starts in 0.1 s and holds no device memory.
What kills a worker (out of memory, a crash, a hang) reaches the parent as WorkerLost.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import IO, Any, Self, TypeVar

import steplab
from steplab.core import Environment, Status
from steplab.core.codec import decode, encode
from steplab.core.errors import ERROR_KINDS, MeasurementError
from steplab.workloads.user_model import named_files

PROGRAM = "steplab.workers.program"
SHOWN_BYTES, SHOWN_LINES = 8_192, 20  # of what a model printed, at most
Progress = Callable[[str], None]
T = TypeVar("T")


def no_progress(text: str) -> None:
    """Show no progress."""


class WorkerLost(Exception):
    """The worker gave no answer: it died ("crashed") or took too long ("timeout")."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class AnyWorker(abc.ABC):
    """A Worker, or several that are called like one; ends with its `with` block.

    A function is named as "module:function". Its arguments and its result are records, plain JSON
    values or paths, and are decoded by its annotations. A parameter called `progress` is filled in
    by the worker: what the function reports there reaches the parent's `progress`.

    `keep` makes an object that stays alive in the worker; ".method" then names one of its methods.
    """

    ranks = 1  # processes that share a step

    def call(
        self,
        function: str,
        returns: type[T],
        *,
        timeout: float,
        progress: Progress = no_progress,
        **arguments: Any,
    ) -> T:
        """Call a function and return its result; raise WorkerLost or the function's own error.

        An error that steplab does not know arrives as a MeasurementError. `timeout` in seconds.
        """
        self.send(function, **arguments)
        return self.receive(returns, timeout=timeout, progress=progress)

    def keep(self, function: str, *, timeout: float, **arguments: Any) -> None:
        """Call a function or class and keep what it returns alive."""
        self.send_keep(function, **arguments)
        self.receive(type(None), timeout=timeout)

    def environment(self, timeout: float) -> Environment:
        """Return what this machine is; a worker that does not start is a MeasurementError."""
        function = "steplab.probes.environment:capture_environment"
        try:
            return self.call(function, Environment, timeout=timeout)
        except WorkerLost as lost:
            raise MeasurementError(f"The worker process does not start: {lost.reason}.") from None

    @abc.abstractmethod
    def send(self, function: str, **arguments: Any) -> None:
        """Ask for a call without waiting for its result."""

    @abc.abstractmethod
    def send_keep(self, function: str, **arguments: Any) -> None:
        """Ask for an object to be kept without waiting until it is made."""

    @abc.abstractmethod
    def receive(self, returns: type[T], *, timeout: float, progress: Progress = no_progress) -> T:
        """Wait for the result of the last call, `timeout` seconds at most."""

    @property
    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Whether nothing of it has ended."""

    @abc.abstractmethod
    def printed(self) -> list[str]:
        """Return the last lines that a model printed, on stdout or stderr, since the last call."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Worker(AnyWorker):
    """A child process, which also ends when its parent ends."""

    def __init__(self) -> None:
        try:
            self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed below
            self.process = start_program(self.log)
        except OSError as error:  # no room for its log, or no process more
            reason = error.strerror or str(error)
            raise MeasurementError(f"The worker process does not start: {reason}.") from None
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.pending = b""
        self.log_begin = 0  # where its log stood at the last call

    def send_keep(self, function: str, **arguments: Any) -> None:
        """Ask for an object to be kept without waiting until it is made."""
        self._write(_request(function, arguments, keep=True))

    def send(self, function: str, **arguments: Any) -> None:
        """Ask for a call without waiting for its result."""
        self._write(_request(function, arguments))

    def receive(self, returns: type[T], *, timeout: float, progress: Progress = no_progress) -> T:
        """Wait for the result of the last call, `timeout` seconds at most."""
        deadline = monotonic() + timeout
        while True:
            message = self._next_message(deadline, timeout)
            if "progress" in message:
                progress(message["progress"])
            elif "error" in message:
                raise ERROR_KINDS[message["error"]](message["message"], message["suggestion"])
            else:
                result: T = decode(returns, message["result"], "the result")
                return result

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self.process.poll() is None

    def end(self) -> None:
        """End the process and whatever it started; who waits for its answer learns that."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def printed(self) -> list[str]:
        """Return the last lines that a model printed since the last call."""
        size = self._log_size()
        begin = max(self.log_begin, size - SHOWN_BYTES)
        # Not by seek: the process writes where the file stands.
        text = os.pread(self.log.fileno(), size - begin, begin).decode(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-SHOWN_LINES:]

    def _log_size(self) -> int:
        return os.fstat(self.log.fileno()).st_size

    def close(self) -> None:
        """End the process and let go of its streams."""
        self.end()
        self.process.wait()
        self.selector.close()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _write(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.log_begin = self._log_size()
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerLost("crashed", self._death()) from None

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
        said = lines[-1] if lines else "no message, as after sys.exit() in the code of a model"
        return f"the worker ended with code {code}: {said}"


class WorkerOwner:
    """Has a worker of its own until its `with` block ends."""

    def __init__(self, worker: AnyWorker | None = None) -> None:
        self.worker: AnyWorker = worker or Worker()

    def close(self) -> None:
        """End its process."""
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _request(function: str, arguments: dict[str, Any], keep: bool = False) -> dict[str, Any]:
    """Return a call as JSON data; paths become absolute, since the worker may change its directory.

    `models` are the files that the user has named: specs among the arguments may come from records,
    so what they name is imported only if it is one of these.
    """
    encoded = {
        name: str(value.resolve()) if isinstance(value, Path) else encode(value)
        for name, value in arguments.items()
    }
    return {"call": function, "arguments": encoded, "keep": keep, "models": named_files()}


def start_program(log: IO[str]) -> subprocess.Popen[bytes]:
    """Start the process of a worker, whose errors go to `log`."""
    return subprocess.Popen(
        # -P: a queue.py in the working directory must not be taken for the library's.
        [sys.executable, "-P", "-m", PROGRAM],
        env={**os.environ, "PYTHONPATH": import_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        # A session of its own: Ctrl-C reaches the parent alone, which then ends the worker.
        start_new_session=True,
    )


def import_path() -> str:
    """Let the worker import this very steplab, also from a bare source tree after a chdir."""
    own = str(Path(steplab.__file__).parents[1].resolve())
    return os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH", "")]))

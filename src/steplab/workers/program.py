"""The child process of `isolate`: reads requests from stdin, writes replies as lines of JSON.

`python -m steplab.workers.program`. Whatever the model prints goes to stderr, so that it cannot be
taken for a reply. When the parent goes away, stdin ends and so does this process, at once.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from steplab.core import RunSpec
from steplab.core.codec import decode, encode
from steplab.core.errors import SteplabError
from steplab.verify.answers import GateAnswers


def serve(kind: type[Answers]) -> None:
    """Answer requests until stdin ends."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    answers = kind(channel)
    while True:
        answers.answer(requests.get())


def _read_requests(requests: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


class Answers(GateAnswers):
    """Holds what lives between two requests: the step that a comparison measures in turns."""

    def __init__(self, channel: TextIO) -> None:
        self.channel = channel
        self.live: Any = None

    def answer(self, request: dict[str, Any]) -> None:
        """Do what is asked; a failure that has a sentence is sent back as that."""
        try:
            done = getattr(self, f"do_{request['do']}")(request)
            self._send({"done": done})
        except SteplabError as error:
            kind = type(error).__name__
            self._send({"error": kind, "message": error.message, "suggestion": error.suggestion})
        except Exception as error:
            message = f"{type(error).__name__}: {error}."
            self._send({"error": "MeasurementError", "message": message, "suggestion": ""})

    def do_environment(self, request: dict[str, Any]) -> Any:
        """Describe this machine."""
        from steplab.probes.environment import capture_environment

        return encode(capture_environment())

    def do_trial(self, request: dict[str, Any]) -> Any:
        """Measure one spec."""
        from steplab.step.trial import trial

        return encode(trial(_spec(request), self._progress))

    def do_profile(self, request: dict[str, Any]) -> Any:
        """Measure and record one spec; the traces are left in the folder that is named."""
        from steplab.profiling.plan import ProfilePlan
        from steplab.profiling.recorder import profile_spec

        plan = decode(ProfilePlan, request["plan"], "plan")
        return encode(profile_spec(_spec(request), plan, Path(request["folder"]), self._progress))

    def do_prepare(self, request: dict[str, Any]) -> Any:
        """Assemble a step and bring it to its steady state."""
        from steplab.step.live import LiveStep

        self.live = LiveStep(_spec(request), self._progress)
        return None

    def do_measure(self, request: dict[str, Any]) -> Any:
        """Time some steps of the prepared one; milliseconds each."""
        return encode(self.live.measure(request["steps"]))

    def do_verify(self, request: dict[str, Any]) -> Any:
        """Raise when the prepared step did not run as asked."""
        self.live.verify()
        return None

    def _progress(self, text: str) -> None:
        self._send({"progress": text})

    def _send(self, message: dict[str, Any]) -> None:
        self.channel.write(json.dumps(message, allow_nan=False) + "\n")
        self.channel.flush()


def _spec(request: dict[str, Any]) -> RunSpec:
    spec: RunSpec = decode(RunSpec, request["spec"], "spec")
    return spec


if __name__ == "__main__":
    serve(Answers)

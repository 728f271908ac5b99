"""The program of a worker process: calls the functions that its parent names.

`python -m steplab.workers.program`. Requests come from stdin and replies go to stdout, as lines of
JSON. Whatever a model prints goes to stderr, so that it cannot be taken for a reply. When the
parent goes away, stdin ends and so does this process, at once.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, get_type_hints

from steplab.core.codec import decode, encode
from steplab.core.errors import SteplabError
from steplab.workloads.user_model import take_named_files


def serve() -> None:
    """Answer requests until stdin ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Not sys.stdin itself: the workers of a DataLoader are forked and close theirs, which would
    # wait for ever for the thread that reads it and does not exist in them.
    words = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # the parent shows it where a call fails
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    # A thread of its own: the end of stdin is noticed while a call is still running.
    threading.Thread(target=_read_requests, args=(words, requests), daemon=True).start()
    program = Program(replies)
    while True:
        program.answer(requests.get())


def _read_requests(words: TextIO, requests: queue.Queue[dict[str, Any]]) -> None:
    for line in words:
        requests.put(json.loads(line))
    os._exit(0)


class Program:
    """Calls functions, and holds the one object that the parent has asked to keep."""

    def __init__(self, replies: TextIO) -> None:
        self.replies = replies
        self.kept: Any = None

    def answer(self, request: Mapping[str, Any]) -> None:
        """Call what is asked for and reply with its result, or with an error in one sentence."""
        try:
            take_named_files(request["models"])
            result = self._call(request["call"], request["arguments"])
            if request["keep"]:
                self.kept, result = result, None
            self._reply({"result": encode(result)})
        except SteplabError as error:
            kind = type(error).__name__
            self._reply({"error": kind, "message": error.message, "suggestion": error.suggestion})
        except Exception as error:
            message = f"{type(error).__name__}: {error}."
            self._reply({"error": "MeasurementError", "message": message, "suggestion": ""})

    def _call(self, name: str, data: Mapping[str, Any]) -> Any:
        function = self._find(name)
        is_class = inspect.isclass(function)
        hints = get_type_hints(function.__init__ if is_class else function)
        arguments = {key: _decode(hints[key], value, key) for key, value in data.items()}
        if "progress" in hints:
            arguments["progress"] = self._report
        return function(**arguments)

    def _find(self, name: str) -> Callable[..., Any]:
        """Return "module:function", or ".method" of the object that is kept."""
        module, _, attribute = name.partition(":")
        owner = importlib.import_module(module) if attribute else self.kept
        found: Callable[..., Any] = getattr(owner, attribute or name.removeprefix("."))
        return found

    def _report(self, text: str) -> None:
        self._reply({"progress": text})

    def _reply(self, message: dict[str, Any]) -> None:
        self.replies.write(json.dumps(message, allow_nan=False) + "\n")
        self.replies.flush()


def _decode(kind: Any, data: Any, name: str) -> Any:
    return Path(data) if kind is Path else decode(kind, data, name)


if __name__ == "__main__":
    serve()

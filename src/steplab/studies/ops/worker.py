"""The child process that measures cells; it dies alone. `python -m steplab.studies.ops.worker`."""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import Any

from steplab.codec import decode, encode
from steplab.engine.worker import Answers, _read_requests
from steplab.spec import RunSpec


class CellAnswers(Answers):
    """Answers as the engine's worker does, but a trial is a cell of an op."""

    def do_trial(self, request: dict[str, Any]) -> Any:
        """Measure one cell."""
        from steplab.studies.ops.cell import measure_cell

        return encode(measure_cell(decode(RunSpec, request["spec"], "spec"), self._progress))


def main() -> None:
    """Answer requests until stdin ends."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    answers = CellAnswers(channel)
    while True:
        answers.answer(requests.get())


if __name__ == "__main__":
    main()

"""The child process that measures cells; it dies alone. `python -m steplab.bench.op_worker`."""

from __future__ import annotations

from typing import Any

from steplab.core import RunSpec
from steplab.core.codec import decode, encode
from steplab.workers.program import Answers, serve


class CellAnswers(Answers):
    """Answers as the engine's worker does, but a trial is a cell of an op."""

    def do_trial(self, request: dict[str, Any]) -> Any:
        """Measure one cell."""
        from steplab.bench.op_cell import measure_cell

        return encode(measure_cell(decode(RunSpec, request["spec"], "spec"), self._progress))


if __name__ == "__main__":
    serve(CellAnswers)

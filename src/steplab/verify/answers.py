"""What a worker process answers for the gate. Torch comes in with the first request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steplab.core import Run, RunSpec
from steplab.core.codec import decode, encode
from steplab.verify.shapes import GateShape


class GateAnswers:
    """Requests to a candidate (open, turn, record) and to the scout (all others)."""

    candidate: Any = None

    def do_candidate(self, request: dict[str, Any]) -> Any:
        """Assemble a recipe, hold it against the references, measure it and keep it alive."""
        from steplab.verify.candidate import Candidate

        shapes = [decode(GateShape, shape, "shape") for shape in request["shapes"]]
        spec: RunSpec = decode(RunSpec, request["spec"], "spec")
        self.candidate = Candidate(spec, shapes, Path(request["references"]))
        return encode(self.candidate.open(self._progress))

    def do_warm(self, request: dict[str, Any]) -> Any:
        """Import what a candidate needs, and open the GPU where there is one."""
        import torch

        import steplab.verify.candidate  # noqa: F401

        if torch.cuda.is_available():
            import torch._inductor.compile_fx

            torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
        return None

    def do_turn(self, request: dict[str, Any]) -> Any:
        """Time some steps of the candidate; milliseconds each."""
        return encode(self.candidate.measure(request["steps"]))

    def do_record(self, request: dict[str, Any]) -> Any:
        """Profile the candidate; the traces are left in the folder that is named."""
        from steplab.profiling.plan import ProfilePlan

        plan, run = decode(ProfilePlan, request["plan"], "plan"), decode(Run, request["run"], "run")
        recorded = self.candidate.record(run, plan, Path(request["folder"]), self._progress)
        return encode(recorded)

    def do_reference(self, request: dict[str, Any]) -> Any:
        """Write what the plain step computes at a shape and in a dtype; why not, or ""."""
        from steplab.verify.references import make_references

        shape = decode(GateShape, request["shape"], "shape")
        return make_references(shape, request["dtype"], Path(request["references"]))

    def do_tell(self, request: dict[str, Any]) -> Any:
        """Tell why even an honest update would not pass by the references, or ""."""
        from steplab.verify.references import why_undecided

        shape = decode(GateShape, request["shape"], "shape")
        return why_undecided(shape, request["dtype"], Path(request["references"]))

    def do_dropout(self, request: dict[str, Any]) -> Any:
        """Tell whether the model drops something at random."""
        from steplab.verify.references import has_dropout

        return has_dropout(decode(RunSpec, request["spec"], "spec"))

    def do_look(self, request: dict[str, Any]) -> Any:
        """Assemble a recipe and run one forward pass; tell the dtype that it declares."""
        from steplab.verify.references import dry_run

        shape = decode(GateShape, request["shape"], "shape")
        return dry_run(decode(RunSpec, request["spec"], "spec"), shape)

    def _progress(self, text: str) -> None:
        raise NotImplementedError

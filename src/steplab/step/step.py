"""The training step. Everything else builds it, changes it or watches it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from steplab.core import Mode
from steplab.core.errors import UserError
from steplab.modules.optimizer import clip_gradients, full_weights
from steplab.modules.rates import DeviceRates
from steplab.probes.disturbances import note_event
from steplab.step.hooks import HookGuard
from steplab.step.usual_shapes import UNUSUAL, UsualShapes, micro_batch_shapes
from steplab.techniques.technique import StepParts
from steplab.workloads.misuse import check_gradients, no_gradient
from steplab.workloads.workload import StepOutput, Workload

if TYPE_CHECKING:
    from steplab.step.graph import StepGraph
    from steplab.step.prefetch import Prefetched

Watch = Callable[[str], contextlib.AbstractContextManager[Any]]
CUDA_GRAPHS = "torch._inductor.cudagraph_trees"


def unwatched(phase: str) -> contextlib.AbstractContextManager[Any]:
    """Watch nothing: the default."""
    return contextlib.nullcontext()


class Step:
    """Forward, backward, clip, update; `mode` says how far it goes.

    `watch(phase)` is entered around every phase: "forward", "backward", "sync" where several ranks
    share the step, "clip", "optimizer"; or around the one phase "replay" where `graph` runs the
    step, in which phases cannot be seen.
    """

    def __init__(
        self,
        workload: Workload,
        parts: StepParts,
        optimizer: torch.optim.Optimizer | None,
        mode: Mode = "full",
        clip: float = 1.0,
    ) -> None:
        self.workload = workload
        self.parts = parts
        self.optimizer = optimizer
        self.mode = mode
        self.clip = clip
        self.watch: Watch = unwatched
        self.forward: Callable[..., Any] = workload.predict if mode == "infer" else workload.loss
        if parts.wrap_forward is not None:
            self.forward = parts.wrap_forward(self.forward)
        # Whether gradients stay until the next step clears them, for a loop that looks at them.
        self.keeps_gradients = False
        self.rates: DeviceRates | None = None  # where the update reads them from the device
        self.hooks: HookGuard | None = None  # where compiled or captured code leaves hooks out
        self.compiled_shapes: UsualShapes | None = None  # others run op by op; None: all compile
        self.graph: StepGraph | None = None
        self.has_updated = False  # whether a whole step was the last thing that it was asked for
        self.reaches_model = False  # whether a backward pass has been seen to reach the model
        self.awaits_batches = False  # whether the recipe prefetches and `batches` is still to come
        # The user's loaders: the one with workers that stands for each, and its latest reading.
        self.loaders: WeakKeyDictionary[Any, tuple[Iterable[Any], Prefetched]] = WeakKeyDictionary()
        # A model that trains as a whole may keep some layers in eval mode: they stay there.
        if mode == "infer":
            parts.model.eval()
        elif not parts.model.training:
            parts.model.train()

    @property
    def model(self) -> torch.nn.Module:
        """The model that is trained."""
        return self.parts.model

    def __call__(self, micro_batches: list[Any]) -> StepOutput:
        """Run one step over one or more micro-batches, whose gradients are averaged."""
        _check_list(micro_batches)
        self._check_loop()
        self.has_updated = False
        output = self._call(micro_batches)
        self.has_updated = self.optimizer is not None
        return output

    def _call(self, micro_batches: list[Any]) -> StepOutput:
        if not self._is_usual(micro_batches):
            with torch.compiler.set_stance("force_eager"):
                return self.run(micro_batches)
        if self.graph is None:
            return self.run(micro_batches)
        watch, self.watch = self.watch, unwatched
        try:
            with watch("replay"):
                return self.graph(micro_batches)
        finally:
            self.watch = watch

    def _check_loop(self) -> None:
        """Refuse to run in a loop in which the recipe would not be what runs."""
        if self.awaits_batches:
            raise UserError(
                "The recipe has prefetch, but these batches are not fetched ahead.",
                "Write for batch in step.batches(loader): step([batch]); or leave prefetch out.",
            )
        if torch.is_autocast_enabled(self.parts.device.type):
            raise UserError(
                "torch.autocast is on around the step, whose recipe says what runs in which dtype.",
                "Leave your autocast out, and have precision=bf16 or the like in the recipe.",
            )

    def _is_usual(self, micro_batches: Sequence[Any]) -> bool:
        """Whether compiled code may run: not for a shape that it would have to be compiled for."""
        if self.hooks is not None:
            self.hooks.check()
        usual = self.compiled_shapes
        if usual is None or usual.include(micro_batch_shapes(micro_batches)):
            return True
        note_event(UNUSUAL)
        return False

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield a loader's batches on the device of the step, as far ahead as `prefetch` says.

        With prefetch a thread reads the loader: batches are made and copied during the step. With
        its workers, processes make them for a DataLoader, and stay for its next epoch.
        """
        from steplab.step.prefetch import Prefetched, started
        from steplab.workloads.user_batches import to_device, with_workers

        device, ahead = self.parts.device, self.parts.batches_ahead
        workers = self.parts.loader_workers
        self.awaits_batches = False
        if not workers:
            moved = (to_device(batch, device) for batch in loader)
            return Prefetched(moved, device, ahead) if ahead else moved
        if loader in self.loaders:
            own, before = self.loaders[loader]
            before.close()  # two readings would take batches from one another
        else:
            own = with_workers("step.batches", loader, workers, device.type == "cuda")
        reading = Prefetched(started(to_device(batch, device) for batch in own), device, ahead)
        self.loaders[loader] = own, reading
        return reading

    def run(self, micro_batches: Sequence[Any]) -> StepOutput:
        """Run one step op by op."""
        # Tells Inductor's CUDA graphs that the last step's outputs may be overwritten. Without
        # its module there are none, and importing that takes a second, in the first step.
        if CUDA_GRAPHS in sys.modules:
            torch.compiler.cudagraph_mark_step_begin()
        output = self.accumulate(micro_batches)
        if self.mode != "infer":
            self.update()
        return output

    def accumulate(self, micro_batches: Sequence[Any]) -> StepOutput:
        """Run all that comes before the update; the gradients are in the parameters then."""
        if self.mode == "infer":
            return self._infer(micro_batches)
        if self.keeps_gradients and self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        count = len(micro_batches)
        outputs = [self._forward_backward(b, i, count) for i, b in enumerate(micro_batches)]
        return self._mean(outputs)

    def _mean(self, outputs: Sequence[StepOutput]) -> StepOutput:
        """Average over micro-batches, those of the other ranks too."""
        values = {"loss": [output.loss for output in outputs]}
        values |= {f".{n}": [out.metrics[n] for out in outputs] for n in outputs[0].metrics}
        if self.parts.scheme is not None:
            means = self.parts.scheme.average(values)
        else:
            # New tensors, also for one micro-batch: a CUDA graph overwrites its outputs on replay.
            means = {
                name: torch.stack(parts).mean(0) if len(parts) > 1 else parts[0].clone()
                for name, parts in values.items()
            }
        return StepOutput(means.pop("loss"), {n[1:]: mean for n, mean in means.items()})

    @torch.no_grad()
    def _infer(self, micro_batches: Sequence[Any]) -> StepOutput:
        for batch in micro_batches:
            with self.watch("forward"), self.parts.forward_context():
                self.forward(self.model, batch)
        return StepOutput(torch.zeros((), device=self.parts.device))

    def _forward_backward(self, batch: Any, index: int, count: int) -> StepOutput:
        scheme, is_last = self.parts.scheme, index == count - 1
        if scheme is None:
            output = self._one_micro_batch(self.model, batch, count)
        else:
            with scheme.micro_batch(index, count):
                output = self._one_micro_batch(scheme.loss_model(), batch, count * scheme.ranks)
        if is_last and self.mode != "forward" and not self.reaches_model:
            # Not sooner: sharded gradients may be incomplete, and hidden, until the last one.
            check_gradients(self.model)
            self.reaches_model = True
        if scheme is not None and self.mode != "forward":
            with self.watch("sync"):
                scheme.sync(is_last)
        return output

    def full_weights(self) -> contextlib.AbstractContextManager[None]:
        """Let the parameters be fp32 inside, where the recipe keeps them in 16 bits too.

        For what adds up small differences of the weights, such as an average of them (EMA).
        """
        return full_weights(self.optimizer)

    def loss(self, batch: Any) -> StepOutput:
        """Return loss and metrics of one batch under the recipe, for a loop with its own backward.

        Such a loop clips, updates (`step.optimizer`) and clears gradients itself. Refused where
        the recipe is about just that: a graph of the whole step, a gradient scaler, several ranks.
        """
        taken = {
            "cuda_graph": self.graph is not None,
            "precision=fp16": self.parts.scaler.is_enabled(),
            "parallel": self.parts.scheme is not None,
        }
        for word, is_taken in taken.items():
            if is_taken:
                raise UserError(
                    f"The recipe has {word}, which needs the whole step.",
                    f"Call step([batch]) instead, or leave {word} out of the recipe.",
                )
        self._check_loop()
        self.has_updated = False
        if not self._is_usual([batch]):
            with torch.compiler.set_stance("force_eager"):
                return self._loss(self.model, batch)
        return self._loss(self.model, batch)

    def _loss(self, model: torch.nn.Module, batch: Any) -> StepOutput:
        with self.watch("forward"), self.parts.forward_context():
            output: StepOutput = self.forward(model, batch)
        return output

    def _one_micro_batch(self, model: torch.nn.Module, batch: Any, in_all: int) -> StepOutput:
        loss, metrics = self._loss(model, batch)
        if self.mode != "forward":
            if not loss.requires_grad:
                raise no_gradient(self.model)
            # Outside autocast, whose cache of 16-bit weights has been freed by now.
            with self.watch("backward"):
                self.parts.scaler.scale(loss / in_all if in_all > 1 else loss).backward()
        return StepOutput(loss.detach(), {k: v.detach() for k, v in metrics.items()})

    def update(self) -> None:
        """Clip the gradients, update the weights and clear the gradients, if the mode says so."""
        if self.optimizer is None:
            self.model.zero_grad(set_to_none=True)
            return
        scaler = self.parts.scaler
        if self.clip:
            with self.watch("clip"):
                scaler.unscale_(self.optimizer)
                scheme = self.parts.scheme
                clipped = self.model.parameters() if scheme is None else scheme.held
                norm = None if scheme is None else scheme.gradient_norm()
                clip_gradients(self.optimizer, clipped, self.clip, norm)
        with self.watch("optimizer"):
            scaler.step(self.optimizer)
            scaler.update()
            if not self.keeps_gradients:
                self.optimizer.zero_grad(set_to_none=True)


def _check_list(micro_batches: Any) -> None:
    """Refuse a bare batch: a tensor would be taken apart, and each row trained on by itself.

    A DataLoader's batch of inputs and targets is a list, too, of tensors that are not alike.
    """
    if isinstance(micro_batches, list) and micro_batches:
        kinds = {(m.dtype, m.shape[1:]) for m in micro_batches if isinstance(m, torch.Tensor)}
        if len(kinds) > 1:
            raise UserError(
                f"A step takes a list of micro-batches, and these {len(micro_batches)} tensors are "
                "the parts of one: their dtypes or shapes differ.",
                "Call it as step([batch]).",
            )
        return
    found = "an empty one" if isinstance(micro_batches, list) else type(micro_batches).__name__
    raise UserError(
        f"A step takes a list of micro-batches, not {found}.", "Call it as step([batch])."
    )

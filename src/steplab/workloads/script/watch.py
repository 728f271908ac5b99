"""Watch: what a training script does, seen from torch: its modules, functions and updates.

The script is made to run plain: torch.compile, autocast and GradScaler are noted and left out,
because they belong to a recipe. `optimizer.step()` changes no weight, so that the model is still
the one that the script began with; when it has shown enough, it is stopped there.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from steplab.core.errors import UserError
from steplab.core.units import counted
from steplab.trace.lines import Frame, innermost_line
from steplab.workloads.misuse import NO_CLOSURE, needs_closure
from steplab.workloads.script.tape import LossTape, TapeRecorder

MICRO_BATCHES = 4  # that are watched at least; steps are watched whole
KEPT = 8  # batches that are kept at most
SEVERAL = (
    'docs/own_models.md says how to make one of them, under "Several optimizers", and what to do '
    'where losses alternate, under "GANs".'
)
# Of the tape against the script, which call the same functions on one device.
LOSS_ERROR, GRADIENT_ERROR = 1e-4, 1e-3


class Enough(BaseException):
    """Ends the script. No Exception, so that `except Exception` does not keep it going."""


class NoFactoryHelps(UserError):
    """A refusal of what no model of one's own could do either."""


class EndedEarly(NoFactoryHelps):
    """The script ended or failed before it had made enough steps."""


@dataclass
class Watched:
    """What a script was seen to do."""

    model: nn.Module
    tape: LossTape
    batches: list[list[Tensor]]
    optimizer: Optimizer
    groups: list[dict[str, Any]]  # of the optimizer, when they were made; parameters by name
    accumulate: int
    clip: float
    recipe: dict[str, str]  # what the script does already
    notes: list[str]  # in what the lifted step differs


class Watch(TorchFunctionMode):
    """Sees every torch function, module call, backward pass and update of the script."""

    def __init__(self, script: Path) -> None:
        super().__init__()
        self.script = script
        self.recorder = TapeRecorder()
        self.depth = 0  # of calls of modules that are noted as one
        self.groups: dict[int, list[dict[str, Any]]] = {}  # options by the id of their optimizer
        self.optimizers: list[Optimizer] = []
        self.root: nn.Module | None = None
        self.tape: LossTape | None = None
        self.batches: list[list[Tensor]] = []
        self.micro_batches = 0
        self.since_step = 0
        self.updates = 0
        self.accumulate = 0
        self.stepped: tuple[Optimizer, str] | None = None
        self.clip = 0.0
        self.clipped: set[int] = set()  # ids of the parameters
        self.recipe: dict[str, str] = {}
        # Of a script with several optimizers: that is the reason if it steps another one next.
        self.open_refusal: UserError | None = None
        self.is_done = False
        self.random_state: list[Tensor] = []  # before the first forward
        self.proof: tuple[float, list[float]] | None = None  # loss and norms of the first gradients

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and note it where its output depends on weights."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self.depth and self.recorder.depends_on_weights((args, kwargs)):
            self.recorder.note(func, None, args, kwargs, output, self.line())
        return output

    def line(self) -> str:
        """Return the innermost line of the script's code that is running."""
        return innermost_line(_frames()) or self.script.name

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Watch from here on."""
        with contextlib.ExitStack() as patches:

            def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
                patches.enter_context(patch.object(owner, name, make(getattr(owner, name))))

            put(nn.Module, "__call__", self._call)
            put(nn.Module, "compile", lambda original: self._note_compile)
            put(torch, "compile", lambda original: self._compile)
            put(torch.autocast, "__init__", self._autocast)
            put(torch.amp.GradScaler, "__init__", _without("enabled"))
            put(torch.autograd, "backward", self._backward)
            put(Optimizer, "add_param_group", self._add_param_group)
            put(torch.autograd.Function, "apply", self._function)
            # As a context, so that it ends with the script.
            entered = patches.enter_context
            put(torch, "set_default_device", lambda original: lambda d: entered(torch.device(d)))
            put(nn.utils, "clip_grad_norm_", self._clip)
            put(nn.utils, "clip_grad_value_", lambda original: self._refuse_clip_value)
            patches.enter_context(self)
            yield

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            if self.depth or not any(p.requires_grad for p in module.parameters()):
                return original(module, *arguments, **options)
            # What a model without gradients returns is data, as in an evaluation.
            words = (arguments, options)
            noted = torch.is_grad_enabled() or self.recorder.depends_on_weights(words)
            if noted and not self.random_state:
                self.random_state = _random_state()
            self.depth += 1
            try:
                output = original(module, *arguments, **options)
            finally:
                self.depth -= 1
            if noted:
                self.recorder.note(None, module, arguments, options, output, self.line())
            return output

        return call

    def _function(self, original: Any) -> Any:
        """Note functions with a backward of their own as one call: their insides have none."""

        def apply(kind: Any, *arguments: Any) -> Any:
            call = types.MethodType(original.__func__, kind)
            if self.depth or not self.recorder.depends_on_weights(arguments):
                return call(*arguments)
            self.depth += 1
            try:
                output = call(*arguments)
            finally:
                self.depth -= 1
            self.recorder.note(call, None, arguments, {}, output, self.line())
            return output

        return classmethod(apply)

    def _compile(self, model: Any = None, **options: Any) -> Any:
        """Stand in for torch.compile: note that it was called, and compile nothing."""
        self._note_compile(None, **options)
        if isinstance(model, nn.Module):  # where scripts look for what was compiled
            object.__setattr__(model, "_orig_mod", model)  # as no part of itself
        return model if model is not None else lambda function: function

    def _note_compile(self, module: Any, *arguments: Any, **options: Any) -> None:
        self.recipe["compile"] = "whole"
        if options.get("mode") not in (None, "default"):
            self.recipe["compile.mode"] = str(options["mode"])

    def _autocast(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        def init(context: Any, *arguments: Any, **options: Any) -> None:
            given = signature.bind(context, *arguments, **options)
            given.apply_defaults()
            if given.arguments["enabled"]:
                device = str(given.arguments["device_type"])
                dtype = given.arguments["dtype"] or torch.get_autocast_dtype(device)
                self.recipe["precision"] = {torch.float16: "fp16"}.get(dtype, "bf16")
            given.arguments["enabled"] = False
            original(*given.args, **given.kwargs)

        return init

    def _add_param_group(self, original: Callable[..., None]) -> Callable[..., None]:
        def step(optimizer: Optimizer, closure: Any = None) -> None:
            self._step(optimizer, closure)

        def add(optimizer: Optimizer, group: dict[str, Any]) -> None:
            original(optimizer, group)
            if all(one is not optimizer for one in self.optimizers):
                self.optimizers.append(optimizer)
                # A method with a function of its own, because schedulers bind that again.
                optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
            # As it was made: schedules begin with another rate, which may be 0, and write it into a
            # rate that is a tensor.
            made = {k: v for k, v in optimizer.param_groups[-1].items() if k != "params"}
            made |= {k: v.clone() for k, v in made.items() if isinstance(v, Tensor)}
            self.groups.setdefault(id(optimizer), []).append(made)
            if made.get("fused"):
                self.recipe["optimizer"] = "fused"

        return add

    def _clip(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def clip(parameters: Any, max_norm: float, *arguments: Any, **options: Any) -> Tensor:
            clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self.clip, self.clipped = float(max_norm), {id(p) for p in clipped}
            return original(clipped, max_norm, *arguments, **options)

        return clip

    def _refuse_clip_value(self, *arguments: Any, **options: Any) -> None:
        raise self.refuse("clips gradients by value, which a step does not do")

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(
            tensors: Any, grad_tensors: Any = None, *arguments: Any, **options: Any
        ) -> None:
            loss = tensors if isinstance(tensors, Tensor) else None
            if loss is None and len(tensors) == 1:
                loss = tensors[0]
            if loss is None or loss.numel() != 1:
                raise self.refuse("calls backward() on something else than one scalar loss")
            self._take(loss)
            original(tensors, grad_tensors, *arguments, **options)
            self.depth += 1  # what steplab does itself is not noted
            if self.proof is None and self.root is not None:
                self.proof = (loss.item(), _norms(self.root))
            self.depth -= 1
            self.recorder = TapeRecorder()

        return backward

    def _take(self, loss: Tensor) -> None:
        """Cut the tape of a micro-batch, and compare it with the first."""
        try:
            if self.root is None:
                self.root = self._find_root(loss)
            tape, data = self.recorder.cut(loss, self.root)
            self._compare(tape)
        except UserError as error:
            if len(self.optimizers) == 1:
                raise
            self.open_refusal = self.open_refusal or error
            return
        shapes = [tensor.shape for tensor in data]
        if not self.batches or shapes == [tensor.shape for tensor in self.batches[0]]:
            self.batches = [*self.batches, data][:KEPT]
        self.micro_batches += 1
        self.since_step += 1

    def _compare(self, tape: LossTape) -> None:
        """Refuse a micro-batch whose loss is not computed as that of the first."""
        if self.tape is None:
            self.tape = tape
        difference = self.tape.difference(tape)
        if difference:
            raise UserError(
                f"{self.script.name} computes its loss in another way from step to step "
                f"({difference}), so that it cannot be lifted out."
            )

    def _find_root(self, loss: Tensor) -> nn.Module:
        """Return the smallest module that holds all modules and weights that the loss goes through.

        Where the script has no such module, a list of those that it calls.
        """
        called, leaves = self.recorder.used_by(loss)
        weights = {id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)}
        weights |= {id(p) for module in called for p in module.parameters()}
        for optimizer in self.optimizers:
            own = _weights(optimizer)
            weights |= own if own & weights else set()
        best: nn.Module | None = None
        fewest = sys.maxsize
        for found in gc.get_objects():
            if not issubclass(type(found), nn.Module):
                continue
            inside = {id(module) for module in found.modules()}
            if len(inside) >= fewest or not all(id(module) in inside for module in called):
                continue
            if weights <= {id(p) for p in found.parameters()}:
                best, fewest = found, len(inside)
        if best is None and not called:
            raise self.refuse("computes its loss without calling a module that has weights")
        return best or nn.ModuleList(dict.fromkeys(called))

    def _step(self, optimizer: Optimizer, closure: Any = None) -> None:
        """Stand in for optimizer.step(): count it, and end the script when it has shown enough."""
        if closure is not None:
            self._refuse_closure(optimizer)
        line = self.line()
        if self.stepped is not None and self.stepped[0] is not optimizer:
            raise UserError(
                f"{self.script.name} steps several optimizers ({self.stepped[1]} and {line}), and "
                "a step has one.",
                SEVERAL,
            )
        if self.open_refusal is not None and self.stepped is not None:
            raise self.open_refusal
        self.stepped = (optimizer, line)
        if not self.since_step:
            return
        self.accumulate = self.accumulate or self.since_step
        self.since_step = 0
        self.updates += 1
        if self.micro_batches >= MICRO_BATCHES and self.open_refusal is None:
            raise Enough

    def _refuse_closure(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if needs_closure(type(optimizer)):
            raise NoFactoryHelps(
                f"{self.script.name} trains with {name} ({self.line()}), which calls the loss "
                "several times within one update, and a step has one forward pass.",
                NO_CLOSURE,
            )
        raise self.refuse("gives optimizer.step() a closure, which a step has no place for")

    def refuse(self, what: str) -> UserError:
        """Return the error for something that cannot be lifted out, with the line."""
        return UserError(f"{self.script.name} {what} ({self.line()}).")

    def failed(self, how: str) -> UserError:
        """Return the error for a script that does not train by itself."""
        return EndedEarly(
            f"{self.script.name} {how}{self._when()}.",
            f"See that {self.script.name} trains by itself.",
        )

    def ended(self) -> UserError:
        """Return the error for a script that came to its end before it had made enough steps."""
        if self.open_refusal is not None:
            return self.open_refusal
        if not self.micro_batches:
            return EndedEarly(
                f"{self.script.name} ended{self._when()}.",
                "Give it words with which it trains in this process, or write a factory: "
                "docs/own_models.md says how.",
            )
        if self.micro_batches >= MICRO_BATCHES and not self.updates:
            return UserError(
                f"{self.script.name} ended{self._when()}, and called step() of no optimizer of "
                "torch."
            )
        needed = math.ceil(MICRO_BATCHES / max(self.accumulate, 1))
        return EndedEarly(
            f"{self.script.name} ended{self._when()}, and steplab needs {needed} steps.",
            "Let it make more of them.",
        )

    def _when(self) -> str:
        if not self.micro_batches:
            return " before its first backward pass"
        plural = "" if self.micro_batches == 1 else "es"
        passes = f"{self.micro_batches} backward pass{plural}"
        return f" after {counted(self.updates, 'step')} ({passes})"

    def result(self) -> Watched:
        """Return what was seen, after the tape has been run beside the script's own loss."""
        assert self.root is not None and self.tape is not None and self.stepped is not None
        self._prove()
        optimizer = self.stepped[0]
        names = {id(p): name for name, p in self.root.named_parameters()}
        groups = []
        for made, group in zip(self.groups[id(optimizer)], optimizer.param_groups, strict=True):
            missing = [p for p in group["params"] if id(p) not in names]
            if missing:
                raise UserError(
                    f"{len(missing)} parameters of the optimizer are in no module that "
                    f"{self.script.name} calls for its loss."
                )
            groups.append({**made, "params": [names[id(p)] for p in group["params"]]})
        updated = _weights(optimizer)
        notes = []
        others = [one for one in self.optimizers if not _weights(one) <= updated]
        if any(_weights(one) & (names.keys() - updated) for one in others):
            raise UserError(
                f"{self.script.name} has {len(self.optimizers)} optimizers, of which one "
                f"({self.stepped[1]}) makes the first updates, and a step has one.",
                SEVERAL,
            )
        if others:
            notes.append(f"the update of {counted(len(others), 'other optimizer')} is left out")
        if self.clip and not updated <= self.clipped:
            notes.append("the gradients of some weights are clipped there, here those of all")
        if not self.root.training:
            notes.append("the script trains its model in eval mode, here it is in training mode")
        return Watched(
            self.root,
            self.tape,
            self.batches,
            optimizer,
            groups,
            self.accumulate,
            self.clip,
            self.recipe,
            notes,
        )

    def _prove(self) -> None:
        """Run the tape of the first micro-batch: its loss and gradients must be the script's."""
        assert self.root is not None and self.tape is not None and self.proof is not None
        cpu, *gpus = self.random_state
        with torch.random.fork_rng(range(len(gpus))):
            torch.set_rng_state(cpu)
            torch.cuda.set_rng_state_all(gpus)
            self.root.zero_grad(set_to_none=True)
            loss = self.tape.run(self.root, self.batches[0])
            loss.backward()
        expected, norms = self.proof
        found = _norms(self.root)
        self.root.zero_grad(set_to_none=True)
        largest = max(norms, default=0.0)
        wrong_gradient = any(
            abs(one - two) > GRADIENT_ERROR * (abs(two) + GRADIENT_ERROR * largest)
            for one, two in zip(found, norms, strict=True)
        )
        if abs(loss.item() - expected) > LOSS_ERROR * abs(expected) or wrong_gradient:
            what = "gradients" if wrong_gradient else f"{loss.item():.6g} instead of {expected:.6g}"
            raise UserError(
                f"The loss of {self.script.name} cannot be lifted out: computed again on the same "
                f"batch it gives other values ({what})."
            )


def _random_state() -> list[Tensor]:
    """Return the state of the CPU's generator, and of those of GPUs that are in use."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpus]


def _weights(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer updates."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _norms(model: nn.Module) -> list[float]:
    """Return the norm of every gradient."""
    return [0.0 if p.grad is None else float(p.grad.norm()) for p in model.parameters()]


def _without(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a change of a function: its argument `name` is False, whatever is given."""

    def change(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        def changed(*arguments: Any, **options: Any) -> None:
            given = signature.bind(*arguments, **options)
            given.arguments[name] = False
            original(*given.args, **given.kwargs)

        return changed

    return change


def _frames() -> Iterator[Frame]:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back

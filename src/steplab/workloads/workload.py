"""Workload: something trainable; WorkloadEntry: what the command line knows of it without torch."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from steplab.core import Mode, registry
from steplab.core.codec import decode, encode
from steplab.core.errors import UserError, did_you_mean
from steplab.core.spec import LONGEST_CONTEXT

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from steplab.core import Work


LARGEST_MODEL = 10**13  # parameters; beyond, torch cannot count the bytes of every tensor
HUGGING_FACE = "hf:"  # begins the name of a workload that is a Hugging Face model


class StepOutput(NamedTuple):
    """What a step returns: a scalar loss and named metrics, all tensors on the device."""

    loss: Tensor
    metrics: Mapping[str, Tensor] = {}


class Workload(Protocol):
    """Something trainable. A batch is whatever `batches` yields and `loss` accepts."""

    def model(self) -> nn.Module:
        """Build the model on torch's default device."""
        ...

    def batches(self, batch: int, device: torch.device, seed: int) -> Iterator[Any]:
        """Yield micro-batches of `batch` sequences on `device`, the same ones for one seed."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> StepOutput:
        """Run the model forward and return its loss."""
        ...

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Run the model forward without a loss, as inference does."""
        ...

    def optimizer(self, model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        """Make the optimizer; `implementation` is `foreach=` or `fused=` where asked for."""
        ...

    def tokens(self, batch: int) -> int:
        """Return the tokens (units of work) in one micro-batch of `batch` sequences."""
        ...

    def work(self, batch: int, mode: Mode, ran: Mapping[str, str]) -> Work | None:
        """Return the FLOPs of one micro-batch by formula; None: count them instead.

        `ran` has the implementation that ran for each op; it decides the hardware FLOPs.
        """
        ...


class TokenReader(Protocol):
    """Reads text and predicts how it goes on; `generator` of a workload of text makes one.

    `generator(model, rows, tokens)` makes room for `tokens` tokens in each of `rows` rows.
    """

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Read new tokens, one or more per row; return the logits (B, V) after the last."""
        ...

    def step(self, token_B1: Tensor) -> Tensor:
        """The same of one token per row, without a number on the host and with all its state in
        tensors that stay where they are: a CUDA graph of it can be replayed. Once a step was made,
        only steps go on.
        """
        ...


@dataclass(frozen=True)
class WorkloadEntry:
    """A workload as the command line sees it: its config type and presets, without torch."""

    name: str
    summary: str
    config: Any  # a frozen dataclass type
    factory: str | Callable[[Any], Workload]  # "module:callable" from config to Workload
    presets: Mapping[str, Any] = field(default_factory=dict)
    cpu_preset: str = ""  # the size on a CPU when none is named
    gpu_preset: str = ""  # the same on a GPU
    starter: str = ""  # the size that `train` takes on a CPU when no flag is about the model
    # By size: settings of `train` that suit it better than the general defaults.
    training: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data: Literal["series", "text"] | None = None  # what `train` feeds it; None: cannot be trained
    source: str = ""  # hash of the file it came from, for a user's own workload
    parameters: Callable[[Any], int] | None = None  # of a config, by formula; None: not known

    def default_size(self, device: str) -> str:
        """Return the preset for "cpu" or "cuda" when no size is named; "" without presets."""
        return self.gpu_preset if device == "cuda" else self.cpu_preset

    def resolve(self, size: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the complete config as JSON data: preset, then overrides, then checks."""
        return dict(encode(self._config(self.unchecked(size, overrides))))

    def unchecked(self, size: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same config where its values may contradict each other."""
        if size and size not in self.presets:
            raise UserError(f"{self.name} has no size {size!r}.", did_you_mean(size, self.presets))
        base = self.presets[size] if size else self.config()
        known = {f.name for f in dataclasses.fields(self.config)}
        for key in overrides:
            if key not in known:
                raise UserError(f"{self.name} has no setting {key!r}.", did_you_mean(key, known))
        return {**encode(base), **overrides}

    def overrides(self, size: str, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the fields in which a complete config differs from a size."""
        base = self.unchecked(size, {})
        return tuple(key for key, value in config.items() if value != base.get(key))

    def open(self, config: Mapping[str, Any]) -> Workload:
        """Import torch and return the workload for a complete config."""
        built = self._config(config)
        if callable(self.factory):
            return self.factory(built)
        module, _, name = self.factory.partition(":")
        workload: Workload = getattr(importlib.import_module(module), name)(built)
        return workload

    def check_weights(self, config: Mapping[str, Any], size: int, where: object) -> None:
        """Refuse a config whose model has more parameters than `size` bytes of weights can hold.

        Config and weights may come from strangers, and the model is built before they meet.
        """
        if self.parameters is None:
            return
        count = self.parameters(self._config(config))
        if count > size:
            raise UserError(
                f"{where} has {size:,} bytes, too few for the {count:,} parameters of its config."
            )

    def _config(self, values: Mapping[str, Any]) -> Any:
        """Return the config, which may come from a record; refuse what nobody can build."""
        config = decode(self.config, dict(values), f"{self.name} config")
        count = self.parameters(config) if self.parameters else 0
        if count > LARGEST_MODEL:
            raise UserError(
                f"This {self.name} would have {count:.1e} parameters, and the largest that can be "
                f"described has {LARGEST_MODEL:.0e}."
            )
        return config


def find_workload(name: str, source: str = "") -> WorkloadEntry:
    """Return the built-in workload of that name, or the user's own model that the user named so.

    Names come from records that strangers may have written, so a name is never taken for a file
    to import: the user has to name that file first (`load_user_model`). `hf:NAME` leads to a
    config, which is data. What has another hash than `source` is refused.
    """
    if is_user_model(name):
        from steplab.workloads.user_model import find_user_model

        return find_user_model(name, source)
    if name.startswith(HUGGING_FACE):
        from steplab.workloads.hugging_face import find_hugging_face

        return find_hugging_face(name, source)
    entry: WorkloadEntry = registry.load("steplab.workloads", name, "WORKLOAD")
    return entry


def requested_workload(word: str) -> WorkloadEntry:
    """Return what a user asks for by a built-in name, `path/to/file.py:factory` or `hf:NAME`.

    The file is imported, so the word must be the user's own, never one out of a record.
    """
    if is_user_model(word):
        from steplab.workloads.user_model import load_user_model

        return load_user_model(word)
    return find_workload(word)


def is_user_model(name: str) -> bool:
    """Whether a name is written like that of a user's own model."""
    return not name.startswith(HUGGING_FACE) and (".py" in name or ":" in name)


def weight_decay_groups(
    model: nn.Module, excluded: Sequence[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: weight decay on matrices only, less `excluded`."""
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim >= 2 and all(p is not e for e in excluded)]
    vectors = [p for p in parameters if p.ndim < 2]
    return [{"params": matrices}, {"params": [*excluded, *vectors], "weight_decay": 0.0}]


def check_context(context: int, max_context: int) -> None:
    """Refuse sequences that are longer than the rotary table of a model, and endless tables."""
    if max_context > LONGEST_CONTEXT:
        raise UserError(f"max_context must be at most {LONGEST_CONTEXT:,}, not {max_context:,}.")
    if context > max_context:
        raise UserError(
            f"context {context} is longer than the model's max_context {max_context}.",
            f"Use --context {max_context} or less, or --max-context {context}.",
        )

"""A user's own model: `path/to/file.py:factory` becomes a workload.

The factory's keyword parameters, with their defaults, become the workload's config and flags.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steplab.core import Mode
from steplab.core.codec import encode
from steplab.core.errors import UserError, did_you_mean
from steplab.workloads.workload import StepOutput, WorkloadEntry

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PLAIN_TYPES = (int, float, str, bool)


@dataclass(frozen=True)
class UserModel:
    """A user's model, its data and its loss: what a factory returns. The rest has defaults."""

    model: nn.Module
    batches: Callable[[int], Iterable[Any]]  # batch size -> endless batches, on any device
    loss: Callable[[nn.Module, Any], Tensor | StepOutput]  # a scalar
    tokens_per_sequence: int = 1
    predict: Callable[[nn.Module, Any], Any] | None = None  # for inference; default: the loss
    optimizer: Callable[..., torch.optim.Optimizer] | None = None  # (model, **implementation)


def load_user_model(name: str) -> WorkloadEntry:
    """Return the entry for `path/to/file.py:factory`, or raise a UserError that says why not."""
    path, colon, factory_name = name.rpartition(":")
    if not colon or not path.endswith(".py") or not factory_name:
        raise UserError(f"{name!r} is not path/to/file.py:factory.")
    factory = _find_factory(Path(path), factory_name)
    config = _config_type(factory, name)

    def open_workload(values: Any) -> UserWorkload:
        return UserWorkload(factory, encode(values), name)

    summary = (inspect.getdoc(factory) or "a model of your own").splitlines()[0]
    source = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    return WorkloadEntry(name, summary, config, open_workload, source=source)


class UserWorkload:
    """A user's model as a `Workload`."""

    def __init__(self, factory: Callable[..., Any], values: dict[str, Any], name: str) -> None:
        self.factory = factory
        self.values = values
        self.name = name
        self.built: UserModel | None = None

    def model(self) -> nn.Module:
        """Call the factory and return its model, on torch's default device."""
        import torch

        built = self.factory(**self.values)
        if not isinstance(built, UserModel):
            raise UserError(
                f"{self.name} returned {type(built).__name__}.",
                "Return steplab.UserModel(model=..., batches=..., loss=...).",
            )
        if not callable(built.batches):
            raise UserError(
                f"The batches of {self.name} are a {type(built.batches).__name__}.",
                "Give a function: batches(size) yields batches of that size, forever.",
            )
        self.built = built
        return built.model.to(torch.get_default_device())

    def batches(self, batch: int, device: torch.device, seed: int) -> Iterator[Any]:
        """Yield the factory's batches, moved to the device."""
        return (_to_device(item, device) for item in self._user_model.batches(batch))

    def loss(self, model: nn.Module, batch: Any) -> StepOutput:
        """Call the user's loss, which must return a tensor."""
        import torch

        output = self._user_model.loss(model, batch)
        if isinstance(output, StepOutput):
            return output
        if not isinstance(output, torch.Tensor):
            raise UserError(f"The loss of {self.name} is {type(output).__name__}, not a tensor.")
        return StepOutput(output)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Call the user's predict, or the loss where there is none."""
        return (self._user_model.predict or self._user_model.loss)(model, batch)

    def optimizer(self, model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        """Call the user's optimizer, or AdamW with torch's defaults."""
        import torch

        make = self._user_model.optimizer
        if make is not None:
            return make(model, **implementation)
        return torch.optim.AdamW(model.parameters(), **implementation)  # type: ignore[arg-type]

    def tokens(self, batch: int) -> int:
        """Tokens in one micro-batch."""
        return batch * self._user_model.tokens_per_sequence

    def work(self, batch: int, mode: Mode, ran: Mapping[str, str]) -> None:
        """No formula: the FLOPs are counted."""

    @property
    def _user_model(self) -> UserModel:
        if self.built is None:
            self.model()
        assert self.built is not None
        return self.built


def _find_factory(path: Path, name: str) -> Callable[..., Any]:
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickling look their module up by name
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} does not import: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.pop(0)
    factory = getattr(module, name, None)
    if not callable(factory):
        own = [k for k, v in vars(module).items() if inspect.isfunction(v)]
        raise UserError(f"{path} has no function {name!r}.", did_you_mean(name, own))
    return factory


def _config_type(factory: Callable[..., Any], name: str) -> Any:
    fields = []
    for parameter in inspect.signature(factory).parameters.values():
        default = parameter.default
        if default is inspect.Parameter.empty or not isinstance(default, PLAIN_TYPES):
            raise UserError(
                f"{name}: the parameter {parameter.name!r} needs a default that is a number, "
                "a text or a bool.",
                f"Write {parameter.name}: int = 256, for example.",
            )
        fields.append((parameter.name, type(default), dataclasses.field(default=default)))
    return dataclasses.make_dataclass("Factory", fields, frozen=True)


def _to_device(item: Any, device: torch.device) -> Any:
    import torch

    if isinstance(item, torch.Tensor):
        return item.to(device, non_blocking=True)
    if isinstance(item, dict):
        return {key: _to_device(value, device) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        moved = [_to_device(value, device) for value in item]
        return type(item)(*moved) if hasattr(item, "_fields") else type(item)(moved)
    return item

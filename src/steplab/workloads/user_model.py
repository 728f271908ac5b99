"""A user's own model: `path/to/file.py:factory` becomes a workload.

The factory's keyword parameters, with their defaults, become the workload's config and flags.

A model is code. Records hold its name and a hash of its file; the file is imported only after the
user has named it in this process, or in the parent of this worker (`load_user_model`).
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
from steplab.core.input_file import shorten
from steplab.workloads.workload import StepOutput, WorkloadEntry, find_workload, is_user_model

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PLAIN_TYPES = (int, float, str, bool)
# By the name that records hold: the absolute path of every file that the user has named.
_files: dict[str, Path] = {}


@dataclass(frozen=True)
class UserModel:
    """A user's model, its data and its loss: what a factory returns. The rest has defaults."""

    model: nn.Module
    batches: Callable[[int], Iterable[Any]]  # batch size -> endless batches, on any device
    loss: Callable[[nn.Module, Any], Tensor | StepOutput]  # a scalar
    tokens_per_sequence: int = 1
    predict: Callable[[nn.Module, Any], Any] | None = None  # for inference; default: the loss
    optimizer: Callable[..., torch.optim.Optimizer] | None = None  # (model, **implementation)


def load_user_model(word: str) -> WorkloadEntry:
    """Import the model `path/to/file.py:factory` that a user names, and remember that it was named.

    The word must come from the user, on the command line or in Python, never from a record.
    """
    path, colon, factory = word.rpartition(":")
    if not colon or not path.endswith(".py") or not factory:
        raise UserError(f"{shorten(word)!r} is not path/to/file.py:factory.")
    file = Path(path).absolute()
    entry = _import(word, file)
    _files[word] = file
    return entry


def find_user_model(name: str, source: str = "") -> WorkloadEntry:
    """Import a model that the user has named before; refuse every other, and changed code.

    Imported anew each time: what one step did to the module must not reach the next.
    """
    if name not in _files:
        raise UserError(
            f"{shorten(name)} is a model of one's own, and nobody has named its file here.",
            "Name it by --model my_model.py:make, in Python by "
            'steplab.load_user_model("my_model.py:make").',
        )
    entry = _import(name, _files[name])
    if source and entry.source != source:
        raise UserError(
            f"{shorten(name)} has changed: the hash of its file was {source}, now it is "
            f"{entry.source}.",
            "Keep both versions in files of their own, and bench each.",
        )
    return entry


def named_files() -> dict[str, str]:
    """Return what the user has named so far, for a worker: absolute paths by name."""
    return {name: str(file) for name, file in _files.items()}


def take_named_files(named: Mapping[str, str]) -> None:
    """Let this worker import what the user has named in its parent."""
    _files.update({name: Path(file) for name, file in named.items()})


def workload_of_record(name: str, where: object, own: WorkloadEntry | None) -> WorkloadEntry:
    """Return the workload that a record was made with; a user's own is `own`, named by the user."""
    if not is_user_model(name):
        if own is not None:
            raise UserError(
                f"{where} is a model of the built-in {shorten(name)}, not of {own.name}.",
                f"Leave {own.name} out: the record knows what it is.",
            )
        return find_workload(name)
    if own is None:
        raise not_named(where, name)
    return own


def not_named(where: object, name: str) -> UserError:
    """Return the error for a record of a user's own model whose file the user has not named."""
    return UserError(
        f"{where} was made with {shorten(name)}, a model of one's own: a record holds its name, "
        "not its code.",
        "Name the file: --model my_model.py:make.",
    )


def is_same_code(own: WorkloadEntry, name: str, source: str) -> bool:
    """Whether a record was made by the same factory of a file with the same content."""
    return own.source == source and own.name.rpartition(":")[2] == name.rpartition(":")[2]


def note_on_code(own: WorkloadEntry, name: str, source: str, where: object) -> str:
    """Say that a record was made with other code than `own`; "" when not, or when nobody knows."""
    if not source or not own.source or is_same_code(own, name, source):
        return ""
    return (
        f"the code has changed: {where} was made with {shorten(name)} (hash {source}), now it is "
        f"{own.name} (hash {own.source})"
    )


def _import(name: str, file: Path) -> WorkloadEntry:
    """Import the file and return the entry of its factory, or a UserError that says why not."""
    factory = _find_factory(name, file)
    config = _config_type(factory, name)

    def open_workload(values: Any) -> UserWorkload:
        return UserWorkload(factory, encode(values), name)

    summary = (inspect.getdoc(factory) or "a model of your own").splitlines()[0]
    source = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
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


def _find_factory(name: str, file: Path) -> Callable[..., Any]:
    """Run the file and return its factory; messages call it as the user did."""
    shown, _, factory_name = name.rpartition(":")
    if not file.is_file():
        raise UserError(f"There is no file {shorten(shown)}.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickling look their module up by name
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{shown} does not import: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.pop(0)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        known = [k for k, v in vars(module).items() if inspect.isfunction(v)]
        hint = did_you_mean(factory_name, known)
        raise UserError(f"{shown} has no function {factory_name!r}.", hint)
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

"""A user's own model: `path/to/file.py:factory` or `package.module:factory` becomes a workload.

The factory's keyword parameters, with their defaults, become the workload's config and flags.
`script:train.py` is a whole training script, out of which the model is lifted.

A model is code. Records hold its name and a hash of its file; the file is imported only after the
user has named it in this process, or in the parent of this worker (`load_user_model`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steplab.core import Mode
from steplab.core.codec import encode
from steplab.core.errors import UserError, did_you_mean
from steplab.core.input_file import is_missing, read_input, shorten
from steplab.workloads.workload import StepOutput, WorkloadEntry

if TYPE_CHECKING:
    import torch
    from torch import nn

PLAIN_TYPES = (int, float, str, bool)
SCRIPT = "script:"  # begins the name of a workload that is a training script
# By the name that records hold: the absolute path of every file that the user has named.
_files: dict[str, Path] = {}


@dataclass(frozen=True)
class UserModel:
    """A user's model, its data and its loss: what a factory returns. The rest has defaults."""

    model: nn.Module
    batches: Callable[[int], Iterable[Any]]  # batch size -> batches, on any device; read again
    # A scalar, a StepOutput, or what has a `.loss` or a ["loss"], as Hugging Face models return.
    loss: Callable[[nn.Module, Any], Any]
    tokens_per_sequence: int = 1
    predict: Callable[[nn.Module, Any], Any] | None = None  # for inference; default: the loss
    optimizer: Callable[..., torch.optim.Optimizer] | None = None  # (model, **implementation)
    # What tables count per second, as in "images"; default: tokens, or samples where each is one.
    unit: str = ""


def load_user_model(word: str) -> WorkloadEntry:
    """Import the model `path/to/file.py:factory` that a user names, and remember that it was named.

    `package.module:factory` is looked for in the working directory, then among what is installed.
    The word must come from the user, on the command line or in Python, never from a record.
    """
    if word.startswith(SCRIPT):
        file = Path(word.removeprefix(SCRIPT)).absolute()
        entry = _script_entry(word, file)
        _files[word] = file
        return entry
    place, _, factory = word.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    if not (place.endswith(".py") or is_module) or not factory:
        raise UserError(
            f"{shorten(word)!r} is neither path/to/file.py:factory nor package.module:factory.",
            f"Name a function of it, as in {word}:make." if word.endswith(".py") else "",
        )
    file = Path(place).absolute() if place.endswith(".py") else _module_file(place)
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
    make_entry = _script_entry if name.startswith(SCRIPT) else _import
    entry = make_entry(name, _files[name])
    if source and entry.source != source:
        raise UserError(
            f"{shorten(name)} has changed: the hash of its file was {shorten(source)}, now it is "
            f"{entry.source}.",
            "Keep both versions in files of their own, and bench each.",
        )
    return entry


def find_script(name: str, source: str = "") -> Path:
    """Return the file of the training script `script:train.py` that the user has named before."""
    find_user_model(name, source)
    return _files[name]


def named_files() -> dict[str, str]:
    """Return what the user has named so far, for a worker: absolute paths by name."""
    return {name: str(file) for name, file in _files.items()}


def take_named_files(named: Mapping[str, str]) -> None:
    """Let this worker import what the user has named in its parent."""
    _files.update({name: Path(file) for name, file in named.items()})


def _script_entry(name: str, file: Path) -> WorkloadEntry:
    """Return the entry of a training script, which is not run before its model is asked for."""
    from steplab.workloads.script.lift import ScriptSettings, make

    if is_missing(file):
        raise UserError(f"There is no file {shorten(name.removeprefix(SCRIPT))}.")
    source = hashlib.sha256(read_input(file)).hexdigest()[:12]

    def open_workload(values: ScriptSettings) -> UserWorkload:
        return UserWorkload(functools.partial(make, file), encode(values), name)

    summary = "a training script of your own"
    return WorkloadEntry(name, summary, ScriptSettings, open_workload, source=source)


def _import(name: str, file: Path) -> WorkloadEntry:
    """Import the file and return the entry of its factory, or a UserError that says why not."""
    if is_missing(file):
        raise UserError(f"There is no file {shorten(name.rpartition(':')[0])}.")
    text = read_input(file)
    factory = _find_factory(name, file, text)
    config = _config_type(factory, name)

    def make(**values: Any) -> Any:
        with _import_folder(name, file):  # it may import its neighbors as late as this
            return factory(**values)

    def open_workload(values: Any) -> UserWorkload:
        return UserWorkload(make, encode(values), name)

    summary = (inspect.getdoc(factory) or "a model of your own").splitlines()[0]
    source = hashlib.sha256(text).hexdigest()[:12]
    return WorkloadEntry(name, summary, config, open_workload, source=source)


class UserWorkload:
    """A user's model as a `Workload`."""

    def __init__(self, factory: Callable[..., Any], values: dict[str, Any], name: str) -> None:
        self.factory = factory
        self.values = values
        self.name = name
        self.built: UserModel | None = None
        self.dtypes: set[torch.dtype] = set()  # of the weights, as they were built
        self.loss_seen = False  # whether the loss has been called
        self.loader_workers: int | None = None  # of the DataLoader that is read; None: of none

    def model(self) -> nn.Module:
        """Call the factory and return its model, on torch's default device."""
        import torch

        from steplab.workloads import misuse

        try:
            built = self.factory(**self.values)
        except Exception as error:
            known = [field.name for field in dataclasses.fields(UserModel)]
            raise misuse.explain_factory_error(self.name, error, known) or error from None
        if not isinstance(built, UserModel):
            raise misuse.refuse_result(self.name, built)
        self.take(built)
        return built.model.to(torch.get_default_device())

    def take(self, built: UserModel) -> None:
        """Use the model, batches and loss of `built`, unless they cannot be used."""
        from steplab.workloads import misuse

        misuse.check_order(self.name, built.model, built.batches, built.loss)
        misuse.check_model(self.name, built.model)
        misuse.check_values(self.name, built.model)
        misuse.check_batches(self.name, built.batches)
        misuse.check_loss(self.name, built.loss)
        if built.predict is not None:
            misuse.check_loss(self.name, built.predict, "predict")
        misuse.check_optimizer(self.name, built.optimizer)
        misuse.check_tokens(self.name, built.tokens_per_sequence)
        self.built = built
        self.dtypes = {p.dtype for p in built.model.parameters()}

    def batches(
        self, batch: int, device: torch.device, seed: int, workers: int = 0
    ) -> Iterator[Any]:
        """Yield the factory's batches without end, moved to the device.

        `workers` processes make them, where they come from a DataLoader; 0: as many as it has.
        """
        from steplab.workloads.user_batches import endless_batches, with_workers

        def epoch(size: int) -> Iterable[Any]:
            found = self._user_model.batches(size)
            if workers:
                found = with_workers(self.name, found, workers, device.type == "cuda")
            self.loader_workers = getattr(found, "num_workers", None)
            return found

        return endless_batches(self.name, epoch, batch, device)

    def loss(self, model: nn.Module, batch: Any) -> StepOutput:
        """Call the user's loss; the first time, see that it leaves the backward pass to the step.

        Only the first time: whoever replaces a method of Tensor makes compiled code check again.
        """
        import torch

        from steplab.workloads import misuse

        function = self._user_model.loss
        if torch.compiler.is_compiling():  # none of what watches over it belongs into a graph
            return misuse.take_loss(self.name, function(model, batch))
        guard = contextlib.nullcontext() if self.loss_seen else misuse.refuse_backward(self.name)
        self.loss_seen = True
        rounded = self._recipe_dtypes()
        with misuse.explained(self.name, "loss", function, model, batch, rounded), guard:
            output = function(model, batch)
        return misuse.take_loss(self.name, output)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Call the user's predict, or the loss where there is none."""
        import torch

        from steplab.workloads import misuse

        function = self._user_model.predict or self._user_model.loss
        if torch.compiler.is_compiling():
            return function(model, batch)
        name = "predict" if self._user_model.predict else "loss"
        rounded = self._recipe_dtypes()
        with misuse.explained(self.name, name, function, model, batch, rounded):
            return function(model, batch)

    def _recipe_dtypes(self) -> set[torch.dtype]:
        """Return the 16-bit dtypes of weights that the factory gave another one."""
        import torch

        now = {p.dtype for p in self._user_model.model.parameters()} - self.dtypes
        return now & {torch.bfloat16, torch.float16}

    @property
    def default_optimizer(self) -> bool:
        """Whether the model brings no optimizer of its own."""
        return self._user_model.optimizer is None

    def optimizer(self, model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        """Call the user's optimizer, or AdamW with torch's defaults."""
        import torch

        from steplab.workloads import misuse

        misuse.check_trainable(model)
        make = self._user_model.optimizer
        if make is None:
            return torch.optim.AdamW(model.parameters(), **implementation)  # type: ignore[arg-type]
        misuse.check_options(self.name, make, implementation)
        with misuse.explained(self.name, "optimizer", make, model):
            made = make(model, **implementation)
        misuse.check_made_optimizer(self.name, made, model)
        return made

    def tokens(self, batch: int) -> int:
        """Tokens in one micro-batch."""
        return batch * self._user_model.tokens_per_sequence

    @property
    def unit(self) -> str:
        """What `tokens` counts."""
        found = self._user_model
        return found.unit or ("tokens" if found.tokens_per_sequence > 1 else "samples")

    def work(self, batch: int, mode: Mode, ran: Mapping[str, str]) -> None:
        """No formula: the FLOPs are counted."""

    @property
    def _user_model(self) -> UserModel:
        if self.built is None:
            self.model()
        assert self.built is not None
        return self.built


def _find_factory(name: str, file: Path, text: bytes) -> Callable[..., Any]:
    """Run the text of a file and return its factory; messages call the file as the user did.

    Compiled here, not by the import system: that would take a __pycache__ for the file, and the
    hash in a record would not be the hash of what ran.
    """
    shown, _, factory_name = name.rpartition(":")
    module_name = file.stem if shown.endswith(".py") else shown
    spec = spec_from_file_location(module_name, file)
    assert spec is not None
    module = module_from_spec(spec)
    try:
        with _import_folder(name, file):
            if spec.parent and spec.parent != module_name:
                importlib.import_module(spec.parent)  # which may import this module itself
            sys.modules[module_name] = module  # dataclasses and pickling look it up by name
            exec(compile(text, str(file), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        line = ""
        if "relative import" in str(error):
            line = (
                "Write from nets import Net, without the dot: its folder is searched; or name it "
                "as package.module:factory."
            )
        raise UserError(
            f"{shown} does not import: {type(error).__name__}: {error}.", line
        ) from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        known = [k for k, v in vars(module).items() if inspect.isfunction(v)]
        hint = did_you_mean(factory_name, known)
        raise UserError(f"{shown} has no function {factory_name!r}.", hint)
    return factory


@contextlib.contextmanager
def _import_folder(name: str, file: Path) -> Iterator[None]:
    """Search the folder of a file first, that of its package for a module; afterward, last.

    Last: what the loss imports in its first call is still found, and no file of the user's stands
    in the way of a module that steplab or torch imports later.
    """
    place = name.rpartition(":")[0]
    depth = 0 if place.endswith(".py") else place.count(".") + (file.name == "__init__.py")
    folder = str(file.parents[depth].resolve())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def _module_file(name: str) -> Path:
    """Return the file of `package.module`, found without running anything."""
    found: ModuleSpec | None = None
    search: Any = [os.getcwd(), *sys.path]
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:length]), search)
        if found is None:
            break
        search = found.submodule_search_locations or []
    if found is None or not (found.origin or "").endswith(".py"):
        raise UserError(
            f"There is no module {shorten(name)} in this folder or among what is installed.",
            "Give its file: path/to/file.py:factory.",
        )
    return Path(found.origin or "").absolute()


def _config_type(factory: Callable[..., Any], name: str) -> Any:
    if inspect.isclass(factory):
        raise UserError(
            f"{name} is a class, not a function.",
            f"Write def make(): return steplab.UserModel(model={factory.__name__}(...), "
            "batches=..., loss=...), and give its name.",
        )
    fields = []
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(
                f"{name} takes {parameter}, from which no flags can be made.",
                "Name each parameter with its default: width: int = 256.",
            )
        default = parameter.default
        if default is inspect.Parameter.empty or not isinstance(default, PLAIN_TYPES):
            raise UserError(
                f"{name}: the parameter {parameter.name!r} needs a default that is a number, "
                "a text or a bool.",
                "Name each setting by itself, as in width: int = 256.",
            )
        fields.append((parameter.name, type(default), dataclasses.field(default=default)))
    return dataclasses.make_dataclass("Factory", fields, frozen=True)

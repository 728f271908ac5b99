"""Run a training script, unedited, until it has made a few steps.

In this process, as `__main__`, with nothing of it saved; what it does is seen by Watch.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from steplab.core.errors import UserError
from steplab.core.input_file import read_input
from steplab.trace.user_frames import error_line
from steplab.workloads.script.untouched import untouched
from steplab.workloads.script.watch import Enough, Watch, Watched

SEED = 0  # of torch, numpy and random, for scripts that set none
BEGINNING = """\
# my_model.py, a start: fill in the dots, then run steplab tune my_model.py:make
import torch

import steplab
{elsewhere}


def make():
    model = {name}(...)  # as in {script}

    def batches(size):
        while True:
            yield ...  # of `size` sequences, on any device

    def loss(model, batch):
        return ...  # one scalar tensor; backward() and step() are steplab's

    def optimizer(model, **how):
        return torch.optim.{kind}(model.parameters(), lr={rate}, **how)

    return steplab.UserModel(model, batches, loss, optimizer=optimizer)
"""


class CannotLift(UserError):
    """The script does what a step cannot; `beginning` is the start of a factory for it.

    "" where the script fails by itself, and no factory would help.
    """

    def __init__(self, error: UserError, beginning: str) -> None:
        super().__init__(error.message, error.suggestion)
        self.beginning = beginning


def watch_script(script: Path, arguments: Sequence[str]) -> Watched:
    """Run a script until it has made a few steps; raise CannotLift for what is no one step."""
    watch = Watch(script)
    try:
        _run(script, arguments, watch)
        return watch.result()
    except ScriptFailed as error:
        raise CannotLift(error, "") from error
    except UserError as error:
        raise CannotLift(error, _beginning(watch)) from error


class ScriptFailed(UserError):
    """The script ended with an error of its own."""


def _run(script: Path, arguments: Sequence[str], watch: Watch) -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    # On the CPU by default, as everywhere outside steplab; the script may ask for any device.
    with torch.device("cpu"), untouched(), watch.patched(), _as_main(script, arguments) as module:
        try:
            code = compile(read_input(script), str(script), "exec", dont_inherit=True)
            exec(code, vars(module))
        except Enough:
            watch.is_done = True
        except UserError:
            raise
        except SystemExit as end:
            if end.code:
                said = f"ended by itself with code {end.code}"
                raise ScriptFailed(watch.too_early(said).message) from None
        except Exception as error:
            said = f"fails with {type(error).__name__}: {error} ({error_line(error)})"
            raise ScriptFailed(watch.too_early(said).message) from error
    if not watch.is_done:
        raise watch.too_early("ended")


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[types.ModuleType]:
    """Yield a new `__main__`; it stays that, because compiled code looks up its globals there."""
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    folder = str(script.parent)
    sys.path.insert(0, folder)
    with patch.object(sys, "argv", [str(script), *arguments]):
        try:
            yield module
        finally:
            sys.path.remove(folder)
            sys.path.append(folder)


def _beginning(watch: Watch) -> str:
    """Return the start of a factory, with what the script has shown."""
    module, name = "nets", "Net"
    if watch.root is not None and not isinstance(watch.root, nn.ModuleList):
        module, name = type(watch.root).__module__, type(watch.root).__name__
    elsewhere = f"from {module} import {name}"
    if module == "__main__":
        elsewhere = f"from nets import {name}  # out of {watch.script.name}, to import it alone"
    kind = type(watch.optimizers[0]).__name__ if watch.optimizers else "AdamW"
    rate = watch.optimizers[0].defaults.get("lr", 1e-3) if watch.optimizers else 1e-3
    return BEGINNING.format(
        elsewhere=elsewhere, name=name, script=watch.script.name, kind=kind, rate=rate
    )

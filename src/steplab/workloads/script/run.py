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

from steplab.core.errors import UserError
from steplab.core.input_file import read_input
from steplab.trace.user_frames import error_line
from steplab.workloads.script.factory_start import factory_start
from steplab.workloads.script.untouched import untouched
from steplab.workloads.script.watch import EndedEarly, Enough, NoFactoryHelps, Watch, Watched

SEED = 0  # of torch, numpy and random, for scripts that set none


class CannotLift(UserError):
    """The script does what a step cannot; `beginning` is the start of a factory for it.

    "" where no factory would help. `ended`: it was not steplab that stopped the script.
    """

    def __init__(self, error: UserError, beginning: str = "", ended: bool = False) -> None:
        super().__init__(error.message, error.suggestion)
        self.beginning = beginning
        self.ended = ended


def watch_script(script: Path, arguments: Sequence[str]) -> Watched:
    """Run a script until it has made a few steps; raise CannotLift for what is no one step."""
    watch = Watch(script)
    try:
        _run(script, arguments, watch)
        return watch.result()
    except EndedEarly as error:
        raise CannotLift(error, ended=True) from error
    except NoFactoryHelps as error:
        raise CannotLift(error) from error
    except UserError as error:
        raise CannotLift(error, factory_start(watch)) from error


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
                raise watch.failed(f"ended by itself with code {end.code}") from None
        except Exception as error:
            message = error.msg if isinstance(error, SyntaxError) else error  # without its line
            said = f"fails with {type(error).__name__}: {message} ({error_line(error)})"
            raise watch.failed(said) from error
    if not watch.is_done:
        raise watch.ended()


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

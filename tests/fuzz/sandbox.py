"""A process that opens inputs one after another and tells what each of them did.

    python -m tests.fuzz.sandbox FOLDER

Requests come from stdin and replies go to stdout, as lines of JSON. While an input is open, an
audit hook watches for code, other programs, the network and files outside of the input's folder;
the address space is limited. The parent ends the process when it does not answer.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.damage import MARK
from tests.fuzz.readers import MEMORY

ROOM = 2 << 30  # bytes of address space beyond what an idle process has
SECONDS = 10.0  # of CPU time for one input
OTHER_PROGRAMS = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "pty.spawn",
    "pickle.find_class", "socket.connect", "socket.getaddrinfo", "socket.bind", "urllib.Request",
)  # fmt: skip
COMMIT = ["git", "describe"]  # by which every Run notes the commit of its folder
CHANGES = (
    "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "shutil.rmtree", "shutil.move",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Readers that are reached only by commands that measure or train.
OPENERS: dict[str, Callable[..., object]] = {}


def opener(function: Callable[..., object]) -> Callable[..., object]:
    """Make a function a command of the sandbox, under its own name."""
    OPENERS[function.__name__] = function
    return function


@opener
def ladder() -> None:
    """Open what an interrupted search goes on from."""
    from steplab.tune.folder import LadderFolder
    from steplab.tune.report import impact_table, reasons_table, untried_table
    from steplab.verify.numerics import load_snapshot

    folder = LadderFolder(Path("ladder"))
    found = folder.load()
    for table in (impact_table(found), reasons_table(found, all_rungs=True), untried_table(found)):
        str(table)
    folder.load_shapes(found.spec)
    load_snapshot(folder.references / "own-fp64.safetensors")


@opener
def recipe(name: str) -> None:
    """Read a recipe as the flag does."""
    from steplab.techniques.recipes import parse_recipe

    parse_recipe(name)


@opener
def words(name: str) -> int:
    """Run the command line in a file, one word a line."""
    from steplab.cli.main import main

    return main(Path(name).read_bytes().decode("utf-8", "surrogateescape").split("\n"))


@opener
def planted() -> None:
    """Do what a test of the sandbox has planted."""
    exec(Path("planted.py").read_text(), {})


class Watch:
    """What an input has done that no input may do."""

    def __init__(self, root: Path) -> None:
        self.root = str(root.resolve())
        self.armed = False
        self.seen: list[str] = []
        self.compiled = ""

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Look at an audit event; what is wrong is noted, and nothing is stopped."""
        if not self.armed or (event == "subprocess.Popen" and args[1][:2] == COMMIT):
            return
        if event in OTHER_PROGRAMS:
            self.seen.append(f"code: {event} {str(args)[:200]}")
        elif event == "compile" and MARK in str(args[0])[:10_000]:
            self.compiled = str(args[1])  # reading a literal compiles it too; code is also run
        elif event == "exec" and args[0].co_filename == self.compiled:
            self.seen.append(f"code: exec of text in the input ({self.compiled})")
        elif event == "import" and MARK in str(args[0]):
            self.seen.append(f"code: import {args[0]}")
        elif event == "exec" and str(getattr(args[0], "co_filename", "")).startswith(self.root):
            self.seen.append(f"code: exec {args[0].co_filename}")
        elif event == "open" and isinstance(args[2], int) and args[2] & WRITING:
            self._outside(event, args[0])
        elif event in CHANGES:
            # With a folder's handle (rmtree), names are relative to a place that was looked at.
            handles = [a for a in args[1:] if isinstance(a, int) and a >= 0 and event != "os.mkdir"]
            if not handles:
                self._outside(event, args[0])

    def _outside(self, event: str, path: object) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        with contextlib.suppress(ValueError):
            full = os.path.realpath(os.fsdecode(path))
            if not full.startswith((self.root, "/dev/null", "/proc/self")):
                self.seen.append(f"outside: {event} {full[:200]}")


def open_input(command: str, folder: Path, watch: Watch) -> list[str]:
    """Run a command in `folder`; return what was wrong, each as "kind: what"."""
    from steplab.cli.main import main
    from steplab.core.errors import SteplabError
    from steplab.core.input_file import set_memory_limit
    from steplab.core.units import read_bytes_count

    first, *rest = command.split()
    code: object = 0
    found: list[str] = []
    begun = time.process_time()
    watch.seen.clear()
    watch.compiled = ""
    watch.armed = True
    try:
        if first in OPENERS:
            set_memory_limit(read_bytes_count(MEMORY))
            code = OPENERS[first](*rest)
        else:
            code = main([*command.split(), "--max-memory", MEMORY])
    except (SteplabError, SystemExit):
        pass
    except MemoryError:
        found.append(f"memory: {_frame()}")
    except BaseException as error:
        found.append(f"traceback: {type(error).__name__}: {str(error)[:150]} {_frame()}")
    finally:
        watch.armed = False
    seconds = time.process_time() - begun
    if seconds > SECONDS:
        found.append(f"hang: {seconds:.0f} s of CPU time")
    if isinstance(code, int) and code == 1:
        found.append("traceback: exit code 1")
    return found + watch.seen[:5]


def _frame() -> str:
    """Return the last line of steplab's own in the exception at hand, and the last of all."""
    frames = traceback.extract_tb(sys.exc_info()[2])
    own = [frame for frame in frames if "/steplab/" in frame.filename]
    shown = {f"{Path(f.filename).name}:{f.lineno}" for f in (*own[-1:], *frames[-1:])}
    return f"({', '.join(sorted(shown))})"


def judge_output(out: bytes, err: bytes) -> list[str]:
    """Return what is wrong with what was printed."""
    found = []
    text = err.decode(errors="replace")
    if b"\x1b" in out + err or b"\x07" in out + err:
        found.append(f"escape: {(out + err)[(out + err).index(0x1B) - 20 :][:60]!r}")
    for word in ("Traceback", "Warning", "Exception ignored", "the system refused"):
        if word in text:
            found.append(f"words: {text[max(0, text.index(word) - 80) :][:250]!r}")
            break
    longest = max(map(len, text.splitlines()), default=0)
    if longest > 2_000:
        found.append(f"words: a line of {longest} letters")
    return found


def prepare() -> None:
    """Import what readers import, and take out what would measure, train or start a process."""
    import pandas  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch

    import steplab.train.loop as loop
    from steplab.core.errors import UserError
    from steplab.workers.client import Worker

    def no_worker(self: object) -> None:
        raise UserError("There are no workers in the sandbox.")

    def no_training(self: Any, stop: object) -> Any:
        return loop.TrainResult(self.step_number, None, False, {})

    # With a GPU, torch's first question to the driver takes more address space than there is.
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0
    Worker.__init__ = no_worker  # type: ignore[method-assign]
    loop.Trainer.run = no_training  # type: ignore[method-assign]
    torch.set_num_threads(1)


def limit_memory() -> None:
    """Allow so much more address space than an idle process has."""
    text = Path("/proc/self/statm").read_text() if Path("/proc/self/statm").exists() else "0"
    used = int(text.split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))


def serve(root: Path) -> None:
    """Answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    outputs = [(root / name).open("wb+") for name in ("out", "err")]
    for number, file in zip((1, 2), outputs, strict=True):
        os.dup2(file.fileno(), number)
    sys.dont_write_bytecode = True
    os.environ["MPLCONFIGDIR"] = str(root)
    prepare()
    limited = False
    watch = Watch(root)
    sys.addaudithook(watch)
    warnings.simplefilter("always")
    for line in sys.stdin:
        request = json.loads(line)
        folder = root / "input"
        os.chdir(root)
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in request["files"].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(base64.b64decode(data))
        os.chdir(folder)
        for file in outputs:
            os.ftruncate(file.fileno(), 0)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
        found = open_input(request["command"], folder, watch)
        sys.stdout.flush()
        sys.stderr.flush()
        printed = [os.pread(file.fileno(), 1 << 20, 0) for file in outputs]
        replies.write(json.dumps(found + judge_output(*printed)) + "\n")
        replies.flush()
        if not limited:  # the first input is honest, and imports what is imported late
            limit_memory()
            limited = True


if __name__ == "__main__":
    serve(Path(sys.argv[1]).resolve())

"""Which files of steplab a command passes through, worker processes included.

A file counts when one of its functions runs; what runs while a module is imported does not count.
The tracer is a `sitecustomize.py` in a folder of its own, which every Python process that the
command starts imports by itself, because the folder stands in PYTHONPATH.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "steplab"

# `sys.setprofile` is called for every function that starts. A file is looked at until it is noted;
# whatever ends the process, the lines written so far stay.
TRACER = """
import os, sys, threading
SOURCE, TARGET, WITHIN, noted = {source!r}, {target!r}, {within!r}, set()
FUNCTION = 1  # CO_OPTIMIZED: set for functions, not for modules and class bodies

def note(frame, event, argument):
    code = frame.f_code
    name = code.co_filename
    if event != "call" or name in noted or not name.startswith(SOURCE):
        return
    if not code.co_flags & FUNCTION:
        return
    inside, caller = not WITHIN, frame
    while caller is not None:
        file, function = caller.f_code.co_filename, caller.f_code.co_name
        if function == "<module>" and caller.f_globals["__name__"] != "__main__":
            if file.startswith(SOURCE):
                return  # a call while a module of steplab is imported
        name_here = file[len(SOURCE):]
        inside = inside or name_here in WITHIN or f"{{name_here}}:{{function}}" in WITHIN
        caller = caller.f_back
    if not inside:
        return
    noted.add(name)
    with open(TARGET, "a") as file:
        file.write(f"{{os.getpid()}} {{name[len(SOURCE):]}}\\n")

threading.setprofile(note)
sys.setprofile(note)
"""


@dataclass(frozen=True)
class Walk:
    """The files that a command entered, in that order: in its own process, and in its workers."""

    command: tuple[str, ...]
    workers: tuple[str, ...]

    def without(self, folders: Sequence[str]) -> "Walk":
        """Leave out the files of some folders."""
        kept = (
            tuple(file for file in files if not file.startswith(tuple(folders)))
            for files in (self.command, self.workers)
        )
        return Walk(*kept)

    def __len__(self) -> int:
        return len({*self.command, *self.workers})

    def __str__(self) -> str:
        new = [file for file in self.workers if file not in self.command]
        lines = [f"- command: {', '.join(self.command)}"]
        return "\n".join([*lines, f"- worker: {', '.join(new)}"] if new else lines)


def walk(words: Sequence[str], folder: Path, within: Sequence[str] = ()) -> Walk:
    """Run `steplab WORDS` in `folder` and return the files it entered, each once.

    `within` names files, or functions as `file.py:function`: only what these call counts.
    """
    tracer, target = folder / "tracer", folder / "walk.txt"
    tracer.mkdir()
    source = TRACER.format(source=f"{SOURCE}{os.sep}", target=str(target), within=tuple(within))
    (tracer / "sitecustomize.py").write_text(source)
    paths = os.pathsep.join([str(tracer), str(SOURCE.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "steplab", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, errors = child.communicate()
    assert child.returncode == 0, errors
    entered = [line.split() for line in target.read_text().splitlines()]
    own = dict.fromkeys(file for pid, file in entered if int(pid) == child.pid)
    others = dict.fromkeys(file for pid, file in entered if int(pid) != child.pid)
    return Walk(tuple(own), tuple(others))

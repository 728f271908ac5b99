"""Which files of steplab a command passes through, worker processes included.

A file counts when one of its functions runs; what runs while a module is imported does not count.
The tracer is a `sitecustomize.py` in a folder of its own, which every Python process that the
command starts imports by itself, because the folder stands in PYTHONPATH.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "steplab"

# `sys.setprofile` is called for every function that starts. A file is looked at until it is noted;
# whatever ends the process, the lines written so far stay.
TRACER = """
import sys, threading
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
        file.write(name[len(SOURCE):] + "\\n")

threading.setprofile(note)
sys.setprofile(note)
"""


def walk(words: Sequence[str], folder: Path, within: Sequence[str] = ()) -> list[str]:
    """Run `steplab WORDS` in `folder`; return the files it entered, in that order, each once.

    `within` names files, or functions as `file.py:function`: only what these call counts.
    """
    tracer, target = folder / "tracer", folder / "walk.txt"
    tracer.mkdir()
    source = TRACER.format(source=f"{SOURCE}{os.sep}", target=str(target), within=tuple(within))
    (tracer / "sitecustomize.py").write_text(source)
    paths = os.pathsep.join([str(tracer), str(SOURCE.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "steplab", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(dict.fromkeys(target.read_text().splitlines()))

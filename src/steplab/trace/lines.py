"""Lines of user code in one form: "model.py:12 (forward)".

The path is relative to the current folder where it lies in it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

Frame = tuple[str, int, str]  # file, line, function

# A range around one line while it runs, which the detailed step opens: "line:model.py:12 (forward)"
LINE_RANGE = "line:"
# Kineto writes paths relative to sys.path: "torch/nn/modules/linear.py(130): forward". The number
# is the first line of the function.
_CALL = re.compile(r"(?P<path>.+)\((?P<line>\d+)\): (?P<function>.+)")
NEXT = "<built-in function next>"  # of a generator or another iterator, whatever its name
MODULE = "nn.Module: "  # how a module's call begins

# Libraries that user code calls. Of the standard library, only what can stand between user code and
# a tensor: a user's own profile.py or test.py must stay visible.
_LIBRARIES = frozenset(
    "torch triton numpy runpy threading contextlib functools typing logging multiprocessing "
    "concurrent asyncio queue copy collections importlib abc enum dataclasses inspect weakref "
    "warnings traceback random selectors unittest _pytest pluggy pytest hypothesis".split()
)
# Inductor names its files by a hash of 51 letters.
_GENERATED = re.compile(r"torchinductor_|(^|/)c[a-z2-7]{51}\.py$")
_INSTALLED = re.compile(rf"(site|dist)-packages/|/lib/python3|{_GENERATED.pattern}")
# Of steplab itself the model's code counts; what runs it is the same for every model. Packages are
# named one by one, because a folder of the user's, or a clone, may be called steplab too; from
# `studies` on they are those of earlier releases, whose traces may still be stored.
_RUNNER = re.compile(
    r"(^|/)steplab/((cli|adapters|bench|tune|estimate|forecasting|verify|train|meter|lint|profiling"
    r"|workers|step|techniques|probes|substitute|parallel|testing|findings|compare|report|trace|store"
    r"|costs|hardware|core"
    r"|studies|engine|explain|record|spec)/|(__init__|__main__|codec|shelf|units|errors)\.py"
    r"|workloads/((user_model|user_batches|misuse|hugging_face)\.py|script/)"
    r"|modules/(optimizer|rates)\.py)"
)
_MODELS = re.compile(r"(^|/)steplab/(workloads|modules|kernels|data)/")


# What torch does on its own account. Saving, printing and reading are asked for by the user.
_FRAMEWORK = re.compile(
    r"((^|/)torch/(?!serialization|_tensor_str|utils/(data|tensorboard)/|hub|distributed/checkpoint)"
    rf"|(^|/)triton/|{_GENERATED.pattern})"
)
_LOADER_FILE = re.compile(r"(^|/|_)(data_?)?(loaders?|sets?|data)\.py$", re.IGNORECASE)
_LOADER_FUNCTION = re.compile(
    r"__next__|__getitems?__|_?(batches|collate\w*|prefetch\w*|\w*data_?loader\w*)"
    r"|_?(get|next|fetch|load|make|read|sample|draw|produce|iter|iterate)_?(over_)?(the_)?"
    r"(mini_?)?(batch|batches|data|dataset|samples?|examples?|items?|images?|tokens|windows?|chunk)"
    # Without a noun these verbs still say it; sample or make may be a model's.
    r"|_?(fetch|load|next|(get|fetch|load|read)_?next)",
    re.IGNORECASE,
)


def is_code(call: str) -> bool:
    """Whether a call is of a Python function in a file, not of a module or a built-in one."""
    return not call.startswith("<") and _CALL.fullmatch(call) is not None


def is_framework(call: str) -> bool:
    """Whether a call is of torch's own code, of code it generated, or of steplab's own."""
    parts = _CALL.fullmatch(call)
    path = parts["path"] if parts else ""
    return _FRAMEWORK.search(path) is not None or _RUNNER.search(path) is not None


def is_loader(call: str) -> bool:
    """Whether a call fetches a batch, by the name of its function or file, or by `next`."""
    if call == NEXT:
        return True
    parts = _CALL.fullmatch(call)
    if parts is None or (_is_library(parts["path"]) and "torch/utils/data/" not in parts["path"]):
        return False
    named = _LOADER_FUNCTION.fullmatch(parts["function"]) is not None
    return named or _LOADER_FILE.search(parts["path"]) is not None


def user_line(call: str) -> str | None:
    """Return "model.py:12 (forward)" for a call of user code; None for libraries and modules."""
    if call.startswith("<") and not call.startswith("<ipython"):
        return None
    parts = _CALL.fullmatch(call)
    if parts is None or _is_library(parts["path"]):
        return None
    return line_text(parts["path"], int(parts["line"]), parts["function"])


def frame_line(frame: Frame) -> str | None:
    """Return the line of a frame as `user_line` writes it; None for libraries."""
    path, line, function = frame
    return user_line(f"{path}({line}): {function}")


def line_text(path: str, line: int, function: str) -> str:
    """Return "model.py:12 (forward)" for a line of any file."""
    return f"{shown_path(path)}:{line} ({function})"


def shown_path(path: str) -> str:
    """Return a path relative to the current folder, else to the folder that Python found it in.

    An absolute one that lies in neither is cut to its last two parts; a relative one is kept,
    because it tells files of one name apart.
    """
    if not path.startswith("/"):
        return path
    short = _relative(path, [os.curdir]) or _relative(path, sys.path)
    return short or "/".join(path.split("/")[-2:])


def _relative(path: str, folders: Iterable[str]) -> str:
    """Return an absolute path relative to the innermost of the folders around it; "" for none."""
    try:
        around = [folder.rstrip("/") + "/" for folder in map(os.path.abspath, folders)]
    except FileNotFoundError:  # the current folder was removed
        return ""
    found = max((f for f in around if path.startswith(f) and f != "/"), key=len, default=path)
    return path.removeprefix(found)


def innermost_line(frames: Iterable[Frame]) -> str | None:
    """Return the first of the frames, given innermost first, that is user code; None if none is."""
    return next((line for line in map(frame_line, frames) if line), None)


def _is_library(path: str) -> bool:
    if _RUNNER.search(path):
        return True
    if _MODELS.search(path):
        return False
    found = _relative(path, sys.path) or path  # as Kineto writes it
    first = found.split("/", 1)[0].removesuffix(".py")
    return first in _LIBRARIES or _INSTALLED.search(path) is not None

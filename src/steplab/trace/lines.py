"""Lines of user code, from the profiler's names of Python calls."""

from __future__ import annotations

import re
from collections.abc import Iterable

Frame = tuple[str, int, str]  # file, line, function

# Kineto writes paths relative to sys.path: "torch/nn/modules/linear.py(130): forward". The number
# is the first line of the function.
_CALL = re.compile(r"(?P<path>.+)\((?P<line>\d+)\): (?P<function>.+)")
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
# named one by one, because a folder of the user's, or a clone, may be called steplab too. The last
# line has packages and files of releases whose traces may still be stored.
_RUNNER = re.compile(
    r"(^|/)steplab/((cli|bench|tune|forecasting|verify|train|meter|lint|profiling|workers|step"
    r"|techniques|probes|parallel|testing|findings|compare|report|trace|store|costs|hardware|core"
    r"|studies|engine|explain|record|spec)/|(__init__|__main__|codec|shelf|units|errors)\.py"
    r"|workloads/(user_model|user_batches|misuse)\.py)"
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
    r"(mini_?)?(batch|batches|data|dataset|samples?|examples?|items?|images?|tokens|windows?|chunk)",
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
    """Whether a call fetches a batch, by the name of its function or file."""
    parts = _CALL.fullmatch(call)
    if parts is None or (_is_library(parts["path"]) and "torch/utils/data/" not in parts["path"]):
        return False
    named = _LOADER_FUNCTION.fullmatch(parts["function"]) is not None
    return named or _LOADER_FILE.search(parts["path"]) is not None


def user_line(call: str) -> str | None:
    """Return "model.py:12 (forward)" for a call of user code; None for libraries and modules.

    A relative path is kept, because it tells files of one name apart; an absolute one is cut to its
    last two parts.
    """
    if call.startswith("<") and not call.startswith("<ipython"):
        return None
    parts = _CALL.fullmatch(call)
    if parts is None or _is_library(parts["path"]):
        return None
    path = parts["path"]
    short = "/".join(path.split("/")[-2:]) if path.startswith("/") else path
    return f"{short}:{parts['line']} ({parts['function']})"


def innermost_line(frames: Iterable[Frame]) -> str | None:
    """Return the first of the frames, given innermost first, that is user code; None if none is."""
    lines = (user_line(f"{path}({line}): {function}") for path, line, function in frames)
    return next((line for line in lines if line), None)


def _is_library(path: str) -> bool:
    first = path.split("/", 1)[0].removesuffix(".py")
    if _RUNNER.search(path):
        return True
    if _MODELS.search(path):
        return False
    return first in _LIBRARIES or _INSTALLED.search(path) is not None

"""Source lines as people name them: `model.py:12 (forward)`."""

from __future__ import annotations

from pathlib import Path

import torch

# The profiler leaves out the part of a path that is on sys.path, the allocator does not.
LIBRARIES = ("torch/", "triton/")
FOLDER = Path(torch.__file__).parents[1].as_posix()


def is_outside(path: str) -> bool:
    """Whether a file belongs neither to torch nor to triton, and is a file at all."""
    inside = path.removeprefix(FOLDER).lstrip("/") if path.startswith(FOLDER) else path
    return bool(path) and path[0] not in "<?" and not inside.startswith(LIBRARIES)


def line_text(path: str, line: int, function: str) -> str:
    """Return file, line and function."""
    return f"{path.rsplit('/', 1)[-1]}:{line} ({function})"

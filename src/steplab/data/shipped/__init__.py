"""A small set of real series that comes with the package; README.md here tells its licence."""

from __future__ import annotations

from pathlib import Path

from steplab.core.errors import UserError, did_you_mean

PREFIX = "shipped:"
SUFFIX = ".npz"
FOLDER = Path(__file__).parent


def shipped_names() -> list[str]:
    """Return what may follow `shipped:`."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def resolve_path(path: Path | str) -> Path:
    """Return the file that `shipped:NAME` stands for; any other path as it is."""
    text = str(path)
    if not text.startswith(PREFIX):
        return Path(path)
    name = text.removeprefix(PREFIX)
    if name not in shipped_names():
        raise UserError(f"There is no {text}.", did_you_mean(name, shipped_names()))
    return FOLDER / f"{name}{SUFFIX}"

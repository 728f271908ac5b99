"""Time-300B on the Hugging Face hub: list its partitions and download one."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steplab.core.errors import SteplabError, Unsupported, UserError, did_you_mean
from steplab.core.units import bytes_
from steplab.data.formats.time300b import META

REPOSITORY = "Maple728/Time-300B"


@dataclass(frozen=True)
class HubFile:
    """A file of the repository: its path and its size in bytes."""

    path: str
    size: int


@dataclass(frozen=True)
class Partition:
    """A folder of the repository: a domain (`energy`), or one dataset of it."""

    name: str
    datasets: int
    size: int  # bytes


def list_files() -> list[HubFile]:
    """Return all files of the repository."""
    hub = _hub()
    with _hub_errors():
        tree = hub.HfApi().list_repo_tree(REPOSITORY, recursive=True, repo_type="dataset")
        return [HubFile(entry.path, entry.size) for entry in tree if hasattr(entry, "size")]


def partitions(files: Iterable[HubFile], inside: str = "") -> list[Partition]:
    """Return the domains, or the datasets inside one; folders without a dataset are left out."""
    sizes: dict[str, int] = {}
    datasets: dict[str, int] = {}
    for file in files if not inside else _below(files, inside):
        folder = file.path.rpartition("/")[0]
        name = folder if inside else folder.partition("/")[0]
        sizes[name] = sizes.get(name, 0) + file.size
        datasets[name] = datasets.get(name, 0) + file.path.endswith(f"/{META}")
    return [
        Partition(name, datasets[name], sizes[name]) for name in sorted(sizes) if datasets[name]
    ]


def download(files: Iterable[HubFile], name: str, out: Path) -> Path:
    """Download a partition to `out` and return its folder.

    Complete files are kept; an interrupted download continues where it stopped.
    """
    hub = _hub()
    wanted = _below(files, name)
    _check_disk_space(wanted, out)
    with _hub_errors():
        hub.snapshot_download(
            repo_id=REPOSITORY,
            repo_type="dataset",
            local_dir=str(out),
            allow_patterns=[f"{name.strip('/')}/*"],
        )
    return out / name.strip("/")


def _below(files: Iterable[HubFile], name: str) -> list[HubFile]:
    """Return the files of a partition, or raise a UserError that names the nearest one."""
    files = list(files)
    wanted = [file for file in files if file.path.startswith(f"{name.strip('/')}/")]
    if wanted:
        return wanted
    folders = [file.path.removesuffix(f"/{META}") for file in files if file.path.endswith(META)]
    known = {*folders, *(folder.partition("/")[0] for folder in folders)}
    raise UserError(f"{REPOSITORY} has no partition {name!r}.", did_you_mean(name, known))


def _check_disk_space(wanted: list[HubFile], out: Path) -> None:
    missing = sum(file.size for file in wanted if not _is_here(out / file.path, file.size))
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if missing > free:
        raise UserError(
            f"The download needs {bytes_(missing)}, but {there} has {bytes_(free)} free.",
            "Choose another folder with --out, or a smaller partition.",
        )


def _is_here(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise Unsupported(
            "Downloading needs huggingface_hub, which is not installed.",
            "pip install 'steplab[hub]'",
        ) from None
    return huggingface_hub


@contextlib.contextmanager
def _hub_errors() -> Iterator[None]:
    """Turn whatever the hub's client raises (HTTP, TLS, names, disk) into one sentence."""
    try:
        yield
    except SteplabError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                "The disk is full.", "Free some space; the same command continues from there."
            ) from error
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(".") or type(error).__name__
        raise Unsupported(
            f"{REPOSITORY} could not be read from the Hugging Face hub: {reason}.",
            "Check the connection; the same command continues with what is already here.",
        ) from error

"""The tensors of a model folder: one safetensors file, or several with an index. No pickles."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steplab.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERN = "*.bin"


@dataclass(frozen=True)
class TensorFolder:
    """Tensors by name, read one at a time."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]  # as safetensors calls them: F32, BF16, ...
    _files: Mapping[str, Any]  # tensor -> open file

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the host, in its own dtype."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


@contextlib.contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFolder]:
    """Open the tensor files of `folder`; their headers are checked against their sizes."""
    from safetensors import SafetensorError, safe_open

    files: dict[str, Any] = {}
    shapes, dtypes = {}, {}
    where, paths, index = _find(folder)
    with contextlib.ExitStack() as stack:
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} cannot be read ({error}).") from None
            for name in sorted(file.keys()):
                if name in files:
                    raise UserError(f"{where} names files that hold {name} twice.")
                files[name] = file
                part = file.get_slice(name)
                shapes[name], dtypes[name] = tuple(part.get_shape()), part.get_dtype()
        strangers = sorted(files.keys() ^ index) if index is not None else []
        if strangers:
            raise UserError(f"{where} and its files do not agree on {strangers[0]}.")
        yield TensorFolder(str(where), shapes, dtypes, files)


def _find(folder: Path) -> tuple[Path, list[Path], set[str] | None]:
    """Return (what to call it, the files, the tensors that an index lists)."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return single, [single], None
    if index.is_file():
        listed = _read_index(index)
        return index, [folder / name for name in sorted(set(listed.values()))], set(listed)
    pickles = sorted(folder.glob(PICKLE_PATTERN))
    if pickles:
        raise UserError(
            f"{pickles[0]} is a pickle, which can run any code while it is read, so it is refused.",
            f"Get the model as {SINGLE_FILE}.",
        )
    raise UserError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}.")


def _read_index(path: Path) -> dict[str, str]:
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        listed = data["weight_map"]
        names = set(listed.values())
        sound = all(isinstance(name, str) and Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise UserError(f"{path} is not an index of safetensors files in its own folder.")
    for name in names:
        if not name.endswith(".safetensors"):
            raise UserError(f"{path} names {name}, and only .safetensors files are read.")
    return dict(listed)

"""Which text a run trains on and is validated on."""

from __future__ import annotations

from pathlib import Path

from steplab.data.text import TextFiles, TextWindows, open_text, python_sources
from steplab.errors import UserError
from steplab.spec.training import TrainSettings, TrainSpec

BYTES = 256


def training_text(spec: TrainSpec) -> TextWindows:
    """Return the windows to train on: of the given files, or of Python's own sources."""
    _check(spec)
    path = spec.settings.dataset_path
    return _windows(open_text(Path(path)) if path else python_sources(held_out=False), spec)


def validation_text(spec: TrainSpec) -> dict[str, TextWindows]:
    """Return held-out windows by name: `val`, and `ood` where text of another kind is given."""
    chosen: dict[str, TextFiles] = {}
    if spec.settings.val_path:
        chosen["val"] = open_text(Path(spec.settings.val_path))
    elif not spec.settings.dataset_path:
        chosen["val"] = python_sources(held_out=True)
    if spec.settings.ood_path:
        chosen["ood"] = open_text(Path(spec.settings.ood_path))
    return {name: _windows(files, spec) for name, files in chosen.items()}


def describe_text(windows: TextWindows) -> str:
    """`data text=Python's standard library bytes=12,345,678 files=650 windows=48,000`."""
    files = windows.series
    return (
        f"data text={files.name} bytes={windows.total:,} files={len(files):,} "
        f"windows={len(windows):,}"
    )


def _windows(files: TextFiles, spec: TrainSpec) -> TextWindows:
    context = int(spec.config["context"])
    return TextWindows(files, context, spec.settings.seq_stride or context)


def _check(spec: TrainSpec) -> None:
    """Refuse what is for series, and a vocabulary that has no room for all bytes."""
    plain = TrainSettings()
    for name in ("mix", "pack", "normalise"):
        if getattr(spec.settings, name) != getattr(plain, name):
            raise UserError(
                f"--{name} is for series, but {spec.workload} is trained on text.",
                f"Leave --{name} out.",
            )
    if int(spec.config["vocab_size"]) < BYTES:
        raise UserError(
            f"A vocabulary of {spec.config['vocab_size']} has no room for all bytes.",
            f"Use --vocab-size {BYTES} or more.",
        )

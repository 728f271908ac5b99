"""Which series or text a run trains on, and which it is validated on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steplab.core import TrainSettings, TrainSpec
from steplab.core.errors import UserError
from steplab.data.formats import open_series
from steplab.data.packing import PackedWindows, window_stats
from steplab.data.sampling import MixedWindows, mixed_paths, parse_shares
from steplab.data.series import SeriesSet
from steplab.data.synthetic import HELD_OUT_FAMILIES, SyntheticSeries
from steplab.data.text import TextFiles, TextWindows, open_text, python_sources
from steplab.data.windows import Windows, WindowSet
from steplab.workloads.workload import find_workload

# Generated series: enough that a default run (4,800 windows) sees few of them twice.
TRAIN_SERIES, HELD_OUT_SERIES = 4096, 256
LENGTH_IN_WINDOWS = 4
BYTES = 256  # ids that a vocabulary needs to hold any text
# Seeds far apart, so that no held-out series is also trained on.
VALIDATION_SEED, OOD_SEED = 1_000_003, 2_000_003


def window_points(spec: TrainSpec) -> int:
    """Return the points per window: one more than the tokens cover, for the last target."""
    return int(spec.config["seq_max_len"]) + 1


def training_windows(spec: TrainSpec) -> WindowSet:
    """Return the windows to train on."""
    if find_workload(spec.workload).data == "text":
        return training_text(spec)
    path = spec.settings.dataset_path
    if spec.settings.mix:
        parts = parse_shares(spec.settings.mix)
        sets = [open_series(Path(each)) for each in mixed_paths(path, parts)]
        return MixedWindows([_packed_or_not(series, spec) for series in sets], parts)
    series = open_series(Path(path)) if path else _generated(spec, TRAIN_SERIES, 0)
    return _packed_or_not(series, spec)


def describe_data(windows: WindowSet, spec: TrainSpec) -> str:
    """Return one line about the windows to train on."""
    if isinstance(windows, TextWindows):
        return describe_text(windows)
    return describe_series(windows.series, spec)


def describe_series(series: SeriesSet, spec: TrainSpec) -> str:
    """`data windows=96 padding=1.2% unused=0.0% packed (without --pack: windows=...)`."""
    points, stride, patch = window_points(spec), _stride(spec), _patch_length(spec)
    plain = window_stats(series.lengths, points, stride, patch, packed=False)
    packed = window_stats(series.lengths, points, stride, patch, packed=True)
    if spec.settings.pack:
        return f"data {packed} packed (without --pack: {plain})"
    return f"data {plain} (with --pack: {packed})"


def validation_windows(spec: TrainSpec) -> Mapping[str, WindowSet]:
    """Return held-out windows by name: `val`, and `ood` for series of another kind.

    Generated series stand in only when the training series are generated too.
    """
    if find_workload(spec.workload).data == "text":
        return validation_text(spec)
    chosen: dict[str, Any] = {}
    generated = not spec.settings.dataset_path
    if spec.settings.val_path:
        chosen["val"] = open_series(Path(spec.settings.val_path))
    elif generated:
        chosen["val"] = _generated(spec, HELD_OUT_SERIES, VALIDATION_SEED)
    if spec.settings.ood_path:
        chosen["ood"] = open_series(Path(spec.settings.ood_path))
    elif generated:
        chosen["ood"] = _generated(spec, HELD_OUT_SERIES, OOD_SEED, HELD_OUT_FAMILIES)
    return {name: _windows(series, spec) for name, series in chosen.items()}


def _generated(spec: TrainSpec, count: int, seed: int, families: Any = None) -> SeriesSet:
    length = LENGTH_IN_WINDOWS * window_points(spec)
    options = {} if families is None else {"families": families}
    return SyntheticSeries(count, length, spec.settings.seed + seed, **options)


def _packed_or_not(series: SeriesSet, spec: TrainSpec) -> WindowSet:
    if not spec.settings.pack:
        return _windows(series, spec)
    points, normalize = window_points(spec), spec.settings.normalize
    return PackedWindows(series, points, _stride(spec), normalize, _patch_length(spec))


def _windows(series: SeriesSet, spec: TrainSpec) -> Windows:
    return Windows(series, window_points(spec), _stride(spec), spec.settings.normalize)


def _stride(spec: TrainSpec) -> int:
    return spec.settings.seq_stride or window_points(spec) - 1


def _patch_length(spec: TrainSpec) -> int:
    return int(spec.config.get("patch_length", 1))


def training_text(spec: TrainSpec) -> TextWindows:
    """Return the windows to train on: of the given files, or of Python's own sources."""
    _check_text_settings(spec)
    path = spec.settings.dataset_path
    return _text_windows(open_text(Path(path)) if path else python_sources(held_out=False), spec)


def validation_text(spec: TrainSpec) -> dict[str, TextWindows]:
    """Return held-out windows by name: `val`, and `ood` where text of another kind is given."""
    chosen: dict[str, TextFiles] = {}
    if spec.settings.val_path:
        chosen["val"] = open_text(Path(spec.settings.val_path))
    elif not spec.settings.dataset_path:
        chosen["val"] = python_sources(held_out=True)
    if spec.settings.ood_path:
        chosen["ood"] = open_text(Path(spec.settings.ood_path))
    return {name: _text_windows(files, spec) for name, files in chosen.items()}


def describe_text(windows: TextWindows) -> str:
    """`data text=Python's standard library bytes=12,345,678 files=650 windows=48,000`."""
    files = windows.series
    return (
        f"data text={files.name} bytes={windows.total:,} files={len(files):,} "
        f"windows={len(windows):,}"
    )


def _text_windows(files: TextFiles, spec: TrainSpec) -> TextWindows:
    context = int(spec.config["context"])
    return TextWindows(files, context, spec.settings.seq_stride or context)


def _check_text_settings(spec: TrainSpec) -> None:
    """Refuse settings that are for series, and a vocabulary with fewer ids than there are bytes."""
    plain = TrainSettings()
    for name in ("mix", "pack", "normalize"):
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

"""What to run: Recipe, RunSpec (one measurement) and TrainSpec (one training run)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from steplab.core.codec import encode
from steplab.core.errors import UserError

Setting = str | int | float | bool
Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class Recipe:
    """Settings per technique: `{"precision": {"dtype": "bf16"}, "compile": {"scope": "blocks"}}`.

    Holds only what was asked for; a technique fills in its own defaults. The order of the
    techniques means nothing: each declares the stage at which it is applied.
    """

    techniques: Mapping[str, Settings] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """One line that `parse_recipe` reads back: `precision=bf16,compile=blocks`."""
        words = []
        for name in sorted(self.techniques):
            for index, (key, value) in enumerate(self.techniques[name].items()):
                # impl is keyed by op, so its first key is no more implied than its second.
                short = index == 0 and name != "impl"
                words.append(f"{name if short else f'{name}.{key}'}={_text(value)}")
        return ",".join(words) or "plain"

    def __str__(self) -> str:
        return self.label


PLAIN = Recipe()


def _text(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


Mode = Literal["infer", "forward", "forward+backward", "full"]
MODES: tuple[str, ...] = get_args(Mode)

Backend = Literal["nccl", "gloo"]
BACKENDS: tuple[str, ...] = get_args(Backend)


@dataclass(frozen=True)
class RunSpec:
    """One cell of a measurement. Frozen, JSON both ways, compared by `fingerprint`."""

    workload: str  # the name of a built-in workload, or of a user's own: path/to/file.py:factory
    config: Mapping[str, Any] = field(default_factory=dict)  # every field of the workload's config
    size: str = ""  # the name of the preset that `config` started from
    batch: int = 4  # sequences per micro-batch
    accumulate: int = 1  # micro-batches per optimizer step, of one rank
    mode: Mode = "full"
    recipe: Recipe = field(default_factory=Recipe)
    device: str = "cpu"  # "cpu" or "cuda"
    clip: float = 1.0  # largest gradient norm; 0 leaves gradients alone
    warmup: int = 5  # untimed steps after compilation has settled
    steps: int = 10  # timed steps
    seed: int = 42
    peak_tflops: float | None = None  # the user's own dense peak for MFU; None: the catalog's
    source: str = ""  # hash of the file that a user's own workload came from
    ranks: int = 1  # processes that share the step
    backend: str = ""  # of their group, "nccl" or "gloo"; "": by the device
    overrides: tuple[str, ...] = ()  # fields of `config` that differ from those of `size`

    def __post_init__(self) -> None:
        require_positive(self, "batch", "accumulate", "steps", "ranks")
        require_at_most(self, MOST_RANKS, "ranks")
        if self.warmup < 0 or self.clip < 0:
            raise UserError("warmup and clip must not be negative.")
        if not math.isfinite(self.clip):
            raise UserError(f"clip must be a finite number, not {self.clip}.")
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            raise UserError(f"The peak must be more than 0 TFLOP/s, not {self.peak_tflops}.")
        if self.mode not in MODES:
            raise UserError(f"mode is {self.mode!r}.", f"Known: {', '.join(MODES)}.")
        check_backend(self.backend)

    @property
    def size_words(self) -> str:
        """The size with what differs from it: `tiny, width 64`."""
        changed = (f"{name} {self.config.get(name)}" for name in self.overrides)
        return ", ".join([*filter(None, [self.size]), *changed])

    @property
    def title(self) -> str:
        """What is measured, in a few words: `gpt tiny, width 64, batch 4, full`."""
        name = f"{self.workload} {self.size_words}" if self.size_words else self.workload
        parts = f", {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{name}, batch {self.batch}{parts}, {self.mode}{ranks}"


def fingerprint(spec: RunSpec) -> str:
    """Return 16 hex digits that are equal exactly for equal specs, on any machine."""
    text = json.dumps(encode(spec), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# What may differ between the cells of a sweep, beside the fields of the config.
SPEC_AXES = ("workload", "size", "batch", "mode", "recipe", "ranks", "accumulate", "warmup")
LENGTHS = ("context", "seq_max_len")  # a condition of every number, even where it is constant
WORDS = ("workload", "size", "mode", "recipe")  # axes whose values explain themselves


def axis_value(spec: RunSpec, axis: str) -> str | int | float | None:
    """Return the value of a spec on an axis: a field of its own or of its config."""
    if axis == "recipe":
        return spec.recipe.label
    value: str | int | float | None = (
        getattr(spec, axis) if axis in SPEC_AXES else spec.config.get(axis)
    )
    return value


def varying_axes(specs: Sequence[RunSpec]) -> list[str]:
    """Return the axes in which the specs differ.

    A size sets many config fields at once: only those that vary within a size count.
    """
    sizes = {(spec.workload, spec.size) for spec in specs}
    config = dict.fromkeys(key for spec in specs for key in spec.config)
    own = [
        key
        for key in config
        if any(
            _distinct([one for one in specs if (one.workload, one.size) == size], key) > 1
            for size in sizes
        )
    ]
    axes = [*SPEC_AXES[:2], *own, *SPEC_AXES[2:]]
    return [axis for axis in axes if _distinct(specs, axis) > 1]


def axes_text(spec: RunSpec, axes: Sequence[str]) -> str:
    """Return a spec's values on some axes: `mod dense, precision=bf16`."""
    named = ("" if axis in WORDS else f"{axis} " for axis in axes)
    return ", ".join(
        f"{name}{axis_value(spec, axis)}" for name, axis in zip(named, axes, strict=True)
    )


def title_axes(specs: Sequence[RunSpec]) -> list[str]:
    """Return the axes whose values all specs share and a title names; what is plain is left out."""
    first = specs[0]
    lengths = [key for key in LENGTHS if all(key in spec.config for spec in specs)]
    overrides = [key for key in first.overrides if key not in lengths]
    axes = ["size", *overrides, *lengths, "batch", "mode", "recipe"]
    shared = [axis for axis in axes if _distinct(specs, axis) == 1]
    return [axis for axis in shared if axis_value(first, axis) not in ("", "plain")]


def shared_text(specs: Sequence[RunSpec]) -> str:
    """Return what all specs share, for a title: `tiny, width 64, context 128, batch 4`."""
    return axes_text(specs[0], title_axes(specs))


def _distinct(specs: Sequence[RunSpec], axis: str) -> int:
    return len({str(axis_value(spec, axis)) for spec in specs})


def require_positive(settings: Any, *names: str) -> None:
    """Raise a UserError unless all of these fields, which are counts, are at least 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise UserError(f"{name} must be at least 1, not {getattr(settings, name)}.")


def check_backend(backend: str) -> None:
    """Raise a UserError unless ranks can exchange tensors by `backend`."""
    if backend not in ("", *BACKENDS):
        raise UserError(f"backend is {backend!r}.", f"Known: {', '.join(BACKENDS)}.")


def require_at_most(settings: Any, most: int, *names: str) -> None:
    """Raise a UserError for a field that is larger: it would be built until memory or time ends."""
    for name in names:
        if getattr(settings, name) > most:
            raise UserError(f"{name} must be at most {most:,}, not {getattr(settings, name):,}.")


def option(default: Any, help: str, resumable: bool = False) -> Any:
    """Declare a dataclass field with a default and one sentence of help.

    `resumable`: a training run that is resumed may have another value.
    """
    return field(default=default, metadata={"help": help, "resumable": resumable})


MOST_LAYERS = 10_000  # they are built one by one, about a millisecond each
LONGEST_CONTEXT = 2**24  # tokens; their rotary table alone takes 4 GiB for heads of 64
MOST_THREADS = 1024  # that read ahead
MOST_RANKS = 2**14  # more than any training has had; they are started or stood in for one by one
MOST_MICRO_BATCHES = 2**20  # per step; all of them are fetched before it begins
LARGEST_RATE = 100.0  # AdamW moves every weight by about the rate: beyond this it is a slip


@dataclass(frozen=True)
class TrainSettings:
    """How to train. A `resumable` setting may change when a run is resumed, the others may not."""

    dataset_path: str = option(
        "",
        "file or folder of series or text, a,b with --mix; default: generated, or Python's sources",
        resumable=True,
    )
    mix: str = option("", "shares in which the sets a,b of --dataset-path are drawn: 0.7,0.3")
    val_path: str = option(
        "",
        "the same for validation; default: generated or Python's sources, none with --dataset-path",
        resumable=True,
    )
    ood_path: str = option(
        "", "series of another kind, for out-of-distribution validation", resumable=True
    )
    from_checkpoint: str = option(
        "", "take the weights and the model of a checkpoint or a Time-MoE folder; the rest is new"
    )
    normalize: Literal["series", "max", "none"] = option(
        "series",
        "scale each series by its mean and standard deviation, by its largest value, or not",
    )
    seq_stride: int = option(0, "points between windows; 0: the window's length")
    pack: bool = option(
        False, "put several short series and tails into one window, masked from one another"
    )
    batch_size: int = option(16, "windows per micro-batch")
    accumulate: int = option(1, "micro-batches per step, on each rank")
    epochs: int = option(1, "number of epochs", resumable=True)
    steps_per_epoch: int = option(
        600, "steps per epoch; 0: build the model, print its size and stop", resumable=True
    )
    lr: float = option(1e-3, "highest learning rate")
    min_lr: float = option(5e-5, "learning rate at the end of the cosine")
    warmup_steps: int = option(-1, "steps of linear warm-up; -1: a twentieth of the run")
    clip: float = option(1.0, "largest gradient norm; 0: no clipping")
    seed: int = option(42, "seed of weights, data order and generated series")
    workers: int = option(2, "threads that read windows ahead", resumable=True)
    log_every: int = option(50, "steps between lines of the log", resumable=True)
    validate_every: int = option(
        200, "steps between validations; 0: only at the end", resumable=True
    )
    validation_batches: int = option(8, "batches per validation", resumable=True)
    checkpoint_dir: str = option("checkpoints", "folder of the checkpoints", resumable=True)
    checkpoint_every: int = option(200, "steps between checkpoints; 0: none at all", resumable=True)
    keep_last: int = option(3, "checkpoints to keep; 0: all", resumable=True)
    log_perf_metrics: bool = option(False, "print FLOPs, MFU and device counters", resumable=True)
    mfu_peak_tflops: float | None = option(None, "dense peak for MFU in TFLOP/s", resumable=True)
    profile: bool = option(False, "record a Chrome trace of step 21", resumable=True)

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "accumulate", "epochs", "log_every", "workers")
        require_at_most(self, MOST_THREADS, "workers")
        require_at_most(self, MOST_MICRO_BATCHES, "accumulate")
        if self.warmup_steps < -1:
            raise UserError(f"warmup_steps must be -1 or more, not {self.warmup_steps}.")
        counts = ("steps_per_epoch", "seq_stride", "validate_every")
        for name in (*counts, "validation_batches", "checkpoint_every", "keep_last"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative, but is {getattr(self, name)}.")
        if not 0 < self.lr <= LARGEST_RATE or not 0 <= self.min_lr <= self.lr:
            raise UserError(
                f"lr {self.lr} must lie between 0 and {LARGEST_RATE}, min_lr {self.min_lr} between "
                "0 and lr."
            )
        if not 0 <= self.clip < math.inf:
            raise UserError(f"clip must be 0 or a positive number, not {self.clip}.")

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.epochs * self.steps_per_epoch


@dataclass(frozen=True)
class TrainSpec:
    """Everything that decides a training run. Frozen, JSON both ways."""

    workload: str
    config: Mapping[str, Any]
    size: str = ""
    recipe: Recipe = field(default_factory=Recipe)
    device: str = "cpu"
    settings: TrainSettings = field(default_factory=TrainSettings)
    source: str = ""  # hash of the file that a user's own workload came from
    ranks: int = 1  # processes that share every step; each computes `accumulate` micro-batches
    backend: str = ""  # by which they exchange tensors; "": nccl on GPUs, gloo on CPUs

    def __post_init__(self) -> None:
        require_positive(self, "ranks")
        require_at_most(self, MOST_RANKS, "ranks")
        require_at_most(self, MOST_MICRO_BATCHES, "micro_batches")
        check_backend(self.backend)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step over all ranks, which stays the same on any number of ranks."""
        return self.settings.accumulate * self.ranks

    def run_spec(self) -> RunSpec:
        """Return the spec of one step of this run."""
        return RunSpec(
            self.workload,
            self.config,
            self.size,
            batch=self.settings.batch_size,
            accumulate=self.settings.accumulate,
            recipe=self.recipe,
            device=self.device,
            clip=self.settings.clip,
            seed=self.settings.seed,
            peak_tflops=self.settings.mfu_peak_tflops,
            source=self.source,
            ranks=self.ranks,
            backend=self.backend,
        )

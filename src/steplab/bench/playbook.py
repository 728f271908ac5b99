"""The Megalodon profiling playbook: its cells, where their files go, its columns. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.kernels.dispatch import AUTO, impls
from steplab.profiling.plan import ProfilePlan
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload

WORKLOAD = "megalodon"
DEFAULT_PRESET = "playbook"  # 8.9M parameters
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16"}
Reduction = Literal["auto", "on", "off"]  # of split bf16 products in bf16
USUAL = ("dtype", "bf16_reduction", "seq_len", "batch_size", "ms_per_step", "peak_mem_gb")
OURS = ("median_ms", "forward_ms", "backward_ms", "optimizer_ms", "tokens_per_s", "ema")
ABOUT = ("use_cache", "mode", "preset", "parameters", "device", "torch", "date", "status")
COLUMNS = USUAL + OURS + ABOUT


@dataclass(frozen=True)
class Playbook:
    """What the flags of the playbook ask for."""

    seq_lens: Sequence[int]
    schedule: ProfilePlan
    out: Path
    dtype: str = "fp32"
    bf16_sweep: bool = False
    preset: str = DEFAULT_PRESET
    config: Mapping[str, Any] = field(default_factory=dict)  # what differs from the preset
    batch: int = 2
    ema: str = AUTO
    use_cache: bool = False
    forward_only: bool = False
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in TORCH_NAMES:
            raise UserError(f"The playbook has no dtype {self.dtype!r}.", "Use fp32 or bf16.")
        if min(self.seq_lens) < 1 or self.batch < 1:
            raise UserError("--seq-lens and --batch-size must be at least 1.")
        if self.bf16_sweep and self.dtype != "bf16":
            raise UserError("--bf16-sweep is about products in bf16.", "Add --dtype bf16.")
        if "context" in self.config:
            raise UserError("The playbook's lengths are --seq-lens.", "Leave --context out.")
        if self.ema != AUTO and self.ema not in impls("ema"):
            names = ", ".join((AUTO, *impls("ema")))
            raise UserError(f"There is no --ema {self.ema!r}.", f"Use one of {names}.")


@dataclass(frozen=True)
class PlaybookCell:
    """One sequence length with one setting of bf16 reductions."""

    spec: RunSpec
    reduction: Reduction
    folder: Path

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return int(self.spec.config["context"])


def playbook_cells(book: Playbook) -> list[PlaybookCell]:
    """Return the cells in the order in which they run."""
    reductions: tuple[Reduction, ...] = ("on", "off") if book.bf16_sweep else ("auto",)
    return [
        PlaybookCell(
            _cell_spec(book, length, reduction), reduction, _cell_folder(book, length, reduction)
        )
        for length in book.seq_lens
        for reduction in reductions
    ]


def _cell_spec(book: Playbook, length: int, reduction: Reduction) -> RunSpec:
    entry = find_workload(WORKLOAD)
    sums = {"on": ",precision.sums=bf16", "off": ",precision.sums=fp32"}.get(reduction, "")
    return RunSpec(
        WORKLOAD,
        entry.resolve(book.preset, {**book.config, "context": length}),
        book.preset,
        batch=book.batch,
        mode="infer" if book.forward_only else "full",
        recipe=parse_recipe(f"precision={book.dtype}{sums},impl.ema={book.ema}"),
        device=book.device,
        clip=0.0,
        seed=book.seed,
    )


def _cell_folder(book: Playbook, length: int, reduction: Reduction) -> Path:
    name = f"{TORCH_NAMES[book.dtype]}_{reduction}_L{length}"
    return book.out / ("forward" if book.forward_only else book.dtype) / name

"""Which cells of attention are measured. No torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steplab.bench.op_bench import OpBench, check_impls, check_least
from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.costs import op_flops

FLEX = "flex"  # torch's FlexAttention under torch.compile, to compare with
TILED_BY_HAND = "triton_flash"  # the implementation whose tiles can be chosen
ALL_TILES = "all"
MIN_CONTEXT = 16  # below, gradients cancel to nothing and no error is relative to anything
TILE_PATTERN = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)")

# Queries and keys of a tile that are worth trying, up to a context.
USUAL_TILES = (
    (256, "16x16 16x32 32x16 32x32 32x64 64x32"),
    (1024, "16x16 32x32 64x32 32x64 64x64 128x32 32x128"),
    (4096, "32x32 64x32 32x64 64x64 128x32 32x128 128x64 64x128"),
    (2**62, "64x32 32x64 64x64 128x32 32x128 128x64 64x128 128x128"),
)


def _flops(config: Mapping[str, Any]) -> tuple[float, float]:
    T, D = config["context"], config["head_width"]
    pairs = config["batch"] * op_flops.attention_pairs(T, T, config["causal"])
    heads = config["heads"]
    return (
        op_flops.attention_forward(pairs, heads, D, D),
        op_flops.attention_backward(pairs, heads, D, D, recompute=True),
    )


OP = OpBench(
    name="attention",
    shape=("batch", "heads", "context", "head_width", "causal", "dtype"),
    ways=("impl", "tiles"),
    results=("out", "dq", "dk", "dv"),
    flops=_flops,
    flops_note="2 matrix products forward and 5 backward over the visible pairs, for every row "
    "alike: flash kernels compute the scores again, which is the fifth",
    x_axis="context",
)


@dataclass(frozen=True)
class Grid:
    """The values of every axis; the cells are all combinations."""

    batches: Sequence[int]
    heads: Sequence[int]
    contexts: Sequence[int]
    head_widths: Sequence[int]
    dtypes: Sequence[str]
    causal: bool
    impls: Sequence[str]
    tiles: Sequence[str] = ()  # rows x columns x warps x stages, or ALL_TILES; none: the table's

    def __post_init__(self) -> None:
        axes = {"batch": self.batches, "heads": self.heads, "head-width": self.head_widths}
        check_least({**axes, "context": self.contexts}, {"context": MIN_CONTEXT})
        check_impls("attention", self.impls, (FLEX,))
        for text in self.tiles:
            check_tile(text)
        if self.tiles and TILED_BY_HAND not in self.impls:
            raise UserError(
                f"--tiles belongs to {TILED_BY_HAND}, which is not measured.",
                f"Add it: --impl {TILED_BY_HAND}",
            )


def check_tile(text: str) -> None:
    """Refuse what is no tile; whether the device can hold it, only the device knows."""
    if text == ALL_TILES:
        return
    found = TILE_PATTERN.fullmatch(text)
    numbers = [int(number) for number in found.groups()] if found else []
    if not numbers or not all(n > 0 and n & (n - 1) == 0 for n in numbers[:3]) or numbers[3] < 1:
        raise UserError(
            f"{text!r} is no tile.",
            "Write rows x columns x warps x stages, as in 128x64x4x3; the first three are powers "
            "of two.",
        )
    if min(numbers[:2]) < 16:
        raise UserError(f"A tile has at least 16 rows and 16 columns, not {text}.")


def tiles_for(context: int, dtype: str, asked: Sequence[str]) -> list[str]:
    """Return the tiles to try at one context; "" is the implementation's own table."""
    found = [""]
    for text in asked:
        if text == ALL_TILES:
            usual = next(tiles for limit, tiles in USUAL_TILES if context <= limit)
            # What won among others of their size on an H200; a third stage of 32 bits is too large.
            stages = 2 if dtype in ("fp32", "tf32") else 3
            warps = {tile: 8 if tile.startswith("128") else 4 for tile in usual.split()}
            found += [f"{tile}x{warps[tile]}x{stages}" for tile in warps]
        else:
            found.append(text)
    return list(dict.fromkeys(found))


def plan(grid: Grid, template: RunSpec, seconds: float) -> list[RunSpec]:
    """Return one spec per cell, shapes outermost; `template` has what is the same in all."""
    specs = []
    shapes = itertools.product(
        grid.dtypes, grid.head_widths, grid.contexts, grid.heads, grid.batches
    )
    for dtype, width, context, heads, batch in shapes:
        for impl in dict.fromkeys(grid.impls):
            by_hand = impl == TILED_BY_HAND
            for tiles in tiles_for(context, dtype, grid.tiles) if by_hand else [""]:
                config: dict[str, Any] = {"batch": batch, "heads": heads, "context": context}
                config |= {"head_width": width, "seconds": seconds}
                config |= {"causal": grid.causal, "dtype": dtype, "impl": impl, "tiles": tiles}
                specs.append(_cell(template, config))
    return specs


def _cell(template: RunSpec, config: dict[str, Any]) -> RunSpec:
    size = f"T{config['context']} D{config['head_width']} {config['dtype']} {config['impl']}"
    fields = {**vars(template), "config": config, "batch": config["batch"]}
    return RunSpec(**{**fields, "size": f"{size} {config['tiles']}".strip()})

"""Time attention: shapes x implementations x tiles, with errors against fp64."""

# B batch, H heads, T queries and keys, D head width
from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steplab.bench.op_bench import COMPILED, Config, OpAxis, OpBench, dtype_axis, impl_axis
from steplab.core.errors import Unsupported, UserError
from steplab.costs import op_flops
from steplab.kernels.dispatch import AUTO

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from steplab.bench.op_accuracy import Accuracy

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


def _flops(config: Config) -> tuple[float, float]:
    T, D = config["context"], config["head_width"]
    pairs = config["batch"] * op_flops.attention_pairs(T, T, config["causal"])
    heads = config["heads"]
    return (
        op_flops.attention_forward(pairs, heads, D, D),
        op_flops.attention_backward(pairs, heads, D, D, recompute=True),
    )


def _check(values: Mapping[str, Sequence[Any]]) -> None:
    tiles = [text for text in values["tiles"] if text]
    for text in tiles:
        _check_tile(text)
    if tiles and TILED_BY_HAND not in values["impl"]:
        raise UserError(
            f"--tiles belongs to {TILED_BY_HAND}, which is not measured.",
            f"Add it: --impl {TILED_BY_HAND}",
        )


def _check_tile(text: str) -> None:
    """Refuse what is not a tile; whether the device can hold it, only the device knows."""
    if text == ALL_TILES:
        return
    found = TILE_PATTERN.fullmatch(text)
    numbers = [int(number) for number in found.groups()] if found else []
    if not numbers or not all(n > 0 and n & (n - 1) == 0 for n in numbers[:3]) or numbers[3] < 1:
        raise UserError(
            f"{text!r} is not a tile.",
            "Write rows x columns x warps x stages, as in 128x64x4x3; the first three are powers "
            "of two.",
        )
    if min(numbers[:2]) < 16:
        raise UserError(f"A tile has at least 16 rows and 16 columns, not {text}.")


def _by_tile(config: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Return one cell per tile; only one implementation has tiles to choose."""
    if config["tiles"] and config["impl"] != TILED_BY_HAND:
        return
    asked = config["tiles"]
    for tiles in usual_tiles(config["context"], config["dtype"]) if asked == ALL_TILES else [asked]:
        yield {**config, "tiles": tiles}


def usual_tiles(context: int, dtype: str) -> list[str]:
    """Return the tiles worth trying at one context, as rows x columns x warps x stages."""
    shapes = next(tiles for limit, tiles in USUAL_TILES if context <= limit).split()
    # What won among others of their size on an H200; a third stage of 32 bits is too large.
    stages = 2 if dtype in ("fp32", "tf32") else 3
    return [f"{shape}x{8 if shape.startswith('128') else 4}x{stages}" for shape in shapes]


class AttentionInstance:
    """Attention over q, k and v that lie in memory as (B, T, H, D), as projections give them."""

    def __init__(self, config: Config, seed: int, device: torch.device) -> None:
        import torch

        from steplab.bench.op_measure import BoundOp, use_dtype

        self.config, self.seed, self.device = config, seed, device
        self.dtype = use_dtype(config["dtype"], device)
        generator = torch.Generator().manual_seed(seed)
        leaves = {name: self._normal(generator).requires_grad_() for name in ("q", "k", "v")}
        self.ran = ""
        attention = self._attention(*leaves.values())
        dout = self._normal(generator)
        self.call = BoundOp(lambda: attention(*leaves.values()), leaves, dout)

    def check(self) -> tuple[list[Accuracy], str]:
        """Compare with fp64: all heads, or as many heads or positions as time allows."""
        from steplab.bench.ops import attention_fp64

        batch, heads, context = (self.config[name] for name in ("batch", "heads", "context"))
        cover = attention_fp64.coverage(
            batch * heads, context, self.config["head_width"], self.device.type
        )
        if cover.context < context:
            short = {**self.config, "batch": 1, "heads": 1, "context": cover.context}
            found, _ = AttentionInstance(short, self.seed, self.device).check()
            return found, f"one head at context {cover.context:,} instead"
        inputs = {**self.call.leaves, "dout": self.call.dout}
        results, causal = self.call.results(), self.config["causal"]
        found = attention_fp64.check_heads(inputs, results, causal, cover.heads)
        part = "all" if cover.heads == batch * heads else f"{cover.heads:,} of {batch * heads:,}"
        return found, f"{part} heads"

    def notes(self) -> list[str]:
        """Say what `auto` took, and what torch.compile replaced."""
        from steplab.bench.op_cell import compiler_notes

        chosen = [f"auto ran {self.ran}"] if self.config["impl"].endswith(AUTO) else []
        return [*chosen, *compiler_notes(self.config["impl"])]

    def _normal(self, generator: torch.Generator) -> Tensor:
        import torch

        shape = [self.config[name] for name in ("batch", "context", "heads", "head_width")]
        x_BTHD = torch.randn(shape, generator=generator).to(self.device, self.dtype)
        return x_BTHD.transpose(1, 2)

    def _attention(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Callable[..., Tensor]:
        from steplab.bench.op_cell import compiled_if_asked
        from steplab.kernels import attention as op

        config, causal = self.config, self.config["causal"]
        impl = config["impl"].removeprefix(COMPILED)
        if impl == FLEX:
            return _flex_attention(config["context"], causal, self.device)
        ran = self.ran = op.choose(impl, q_BHTD, k_BHTD, v_BHTD, causal)
        if config["tiles"]:
            tiled = attention_with_tiles(config["tiles"])
            return lambda q, k, v: tiled(op.AttentionInputs(q, k, v, causal))
        return compiled_if_asked(config["impl"], lambda q, k, v: op.attention(ran, q, k, v, causal))


@functools.cache  # an op is registered once per process
def attention_with_tiles(tiles: str) -> Callable[..., Tensor]:
    """Return `attention(inputs)` by the Triton kernels, all three with these tiles."""
    import torch

    from steplab.kernels.attention import triton_flash
    from steplab.kernels.attention._flash_op import flash_op

    found = TILE_PATTERN.fullmatch(tiles)
    assert found, tiles
    rows, columns, warps, stages = (int(number) for number in found.groups())
    by_copy_engine = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    tiling = triton_flash.Tiling(rows, columns, warps, stages, by_copy_engine)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return triton_flash.forward_by(tiling, *args)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        out, lse, *mask = rest
        dq, delta = triton_flash.dq_by(tiling, dout, q, k, v, out, lse, *mask)
        return dq, *triton_flash.dkdv_by(tiling, dout, q, k, v, lse, delta, *mask)

    return flash_op(f"triton_flash_{tiles}", forward, backward)


def _flex_attention(context: int, causal: bool, device: torch.device) -> Callable[..., Tensor]:
    """Return `attention(q, k, v)`; the block mask is made here, outside of what is timed."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device.type != "cuda":
        raise Unsupported("flex has no backward on a CPU.")
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    if not causal:
        return lambda q, k, v: compiled(q, k, v)
    mask = create_block_mask(_is_visible, None, None, context, context, device=device.type)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def _is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


BENCH = OpBench(
    name="attention",
    kernel="attention",
    axes=(
        OpAxis("batch", "number of sequences", gpu=[16], cpu=[1]),
        OpAxis("heads", "attention heads", gpu=[12], cpu=[4]),
        OpAxis(
            "context", "positions of a sequence", gpu=[4096], cpu=[128, 512], minimum=MIN_CONTEXT
        ),
        OpAxis("head_width", "width of a head", gpu=[64, 128], cpu=[64]),
        OpAxis("causal", "a query sees no later key", gpu=[True], cpu=[True], kind=bool),
        dtype_axis(),
        impl_axis(
            gpu=["triton_flash", "cudnn", "flash", "efficient", FLEX, "compiled-reference"],
            cpu=["flash", "math", "tiled", "reference", "compiled-reference"],
            more=f", and {FLEX} is torch's FlexAttention",
        ),
        OpAxis(
            "tiles",
            f"tiles of {TILED_BY_HAND} to try beside its own: rows x columns x warps x stages, as "
            f"in 128x64x4x3, or {ALL_TILES} for the usual ones",
            gpu=[],
            cpu=[],
            kind=str,
            is_shape=False,
            always=[""],
        ),
    ),
    build=AttentionInstance,
    size="T{context} D{head_width} {dtype} {impl} {tiles}",
    results=("out", "dq", "dk", "dv"),
    flops=_flops,
    flops_note="2 matrix products forward and 5 backward over the visible pairs, for every row "
    "alike: flash kernels compute the scores again, which is the fifth",
    x_axis="context",
    peers=(FLEX,),
    check=_check,
    expand=_by_tile,
)

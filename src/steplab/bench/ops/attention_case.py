"""One cell of attention: its inputs, its implementation and its check. Imports torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from steplab.bench.op_accuracy import Accuracy
from steplab.bench.op_bench import COMPILED
from steplab.bench.op_cell import compiled_if_asked, compiler_notes
from steplab.bench.op_measure import OpCall, use_dtype
from steplab.bench.ops import attention_fp64
from steplab.bench.ops.attention import FLEX, TILE_PATTERN
from steplab.core import RunSpec
from steplab.core.errors import Unsupported
from steplab.kernels import attention as op
from steplab.kernels.attention import AttentionInputs
from steplab.kernels.attention import triton_flash as launch
from steplab.kernels.attention._flash_op import flash_op
from steplab.kernels.attention.triton_flash import Tiling
from steplab.kernels.dispatch import AUTO

# B batch, H heads, T queries and keys, D head width


def flex_attention_call(context: int, causal: bool, device: torch.device) -> Callable[..., Tensor]:
    """Return `attention(q, k, v)`; the block mask is made here, outside of what is timed."""
    if device.type != "cuda":
        raise Unsupported("flex has no backward on a CPU.")
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    if not causal:
        return lambda q, k, v: compiled(q, k, v)
    mask = create_block_mask(_is_seen, None, None, context, context, device=device.type)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def _is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


# B batch, H heads, T queries, D head width


@functools.cache  # an op is registered once per process
def attention_with_tiles(tiles: str) -> Callable[..., Tensor]:
    """Return `attention(inputs)` whose three kernels all have these tiles."""
    found = TILE_PATTERN.fullmatch(tiles)
    assert found, tiles
    rows, columns, warps, stages = (int(number) for number in found.groups())
    by_copy_engine = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    tiling = Tiling(rows, columns, warps, stages, by_copy_engine)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return launch.forward_by(tiling, *args)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        out, lse, *mask = rest
        dq, delta = launch.dq_by(tiling, dout, q, k, v, out, lse, *mask)
        return dq, *launch.dkdv_by(tiling, dout, q, k, v, lse, delta, *mask)

    return flash_op(f"triton_flash_{tiles}", forward, backward)


# B batch, H heads, T queries and keys, D head width


class AttentionInstance:
    """Attention over q, k and v that lie in memory as (B, T, H, D), as projections give them."""

    def __init__(self, config: Mapping[str, Any], seed: int, device: torch.device) -> None:
        self.config, self.seed, self.device = config, seed, device
        self.dtype = use_dtype(config["dtype"], device)
        generator = torch.Generator().manual_seed(seed)
        leaves = {name: self._normal(generator).requires_grad_() for name in ("q", "k", "v")}
        self.ran = ""
        attend = self._attention(*leaves.values())
        self.subject = OpCall(lambda: attend(*leaves.values()), leaves, self._normal(generator))

    def check(self) -> tuple[list[Accuracy], str]:
        """Compare all heads with fp64; where that takes too long some of them, or a shorter one."""
        batch, heads, context = (self.config[name] for name in ("batch", "heads", "context"))
        cover = attention_fp64.coverage(
            batch * heads, context, self.config["head_width"], self.device.type
        )
        if cover.context < context:
            shorter = AttentionInstance(
                {**self.config, "batch": 1, "heads": 1, "context": cover.context},
                self.seed,
                self.device,
            )
            return shorter.check()[0], f"one head at context {cover.context:,} instead"
        inputs = {**self.subject.leaves, "dout": self.subject.dout}
        found = attention_fp64.check(
            inputs, self.subject.results(), self.config["causal"], cover.heads
        )
        part = "all" if cover.heads == batch * heads else f"{cover.heads:,} of {batch * heads:,}"
        return found, f"{part} heads"

    def notes(self) -> list[str]:
        """Say what `auto` took, and what torch.compile replaced."""
        chosen = [f"auto ran {self.ran}"] if self.config["impl"].endswith(AUTO) else []
        return [*chosen, *compiler_notes(self.config["impl"])]

    def _normal(self, generator: torch.Generator) -> Tensor:
        shape = [self.config[name] for name in ("batch", "context", "heads", "head_width")]
        x_BTHD = torch.randn(shape, generator=generator).to(self.device, self.dtype)
        return x_BTHD.transpose(1, 2)

    def _attention(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Callable[..., Tensor]:
        config, causal = self.config, self.config["causal"]
        impl = config["impl"].removeprefix(COMPILED)
        if impl == FLEX:
            return flex_attention_call(config["context"], causal, self.device)
        self.ran = op.choose(impl, q_BHTD, k_BHTD, v_BHTD, causal)
        if config["tiles"]:
            chosen = attention_with_tiles(config["tiles"])
            return lambda q, k, v: chosen(AttentionInputs(q, k, v, causal))
        ran = self.ran
        return compiled_if_asked(config["impl"], lambda q, k, v: op.attention(ran, q, k, v, causal))


def build(spec: RunSpec, device: torch.device) -> AttentionInstance:
    """Return the case of one cell; an implementation that cannot take it raises Unsupported."""
    return AttentionInstance(spec.config, spec.seed, device)

"""The models of own_loop.py: how each is made, its loss, and the ways to train it.

The first row of a case is what its users have today.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steplab.core.errors import UserError

RATE, BETAS, DECAY = 6e-4, (0.9, 0.95), 0.1
FAST = "compile=loss,substitute=all,precision=bf16-weights,optimizer=one-pass"
GRAPH = f"{FAST},cuda_graph=step"
# Its blocks are equal, so one of them is compiled; uncompiled around them, no mask is built.
MIXTURE = "compile=blocks,substitute=experts,precision=bf16-weights,optimizer=one-pass"
GROUPED = {"experts": "grouped_mm"}


@dataclass(frozen=True)
class Row:
    """One way to train: a recipe of ours, or by hand what `compiled` names ("" for nothing)."""

    name: str
    recipe: str = ""
    compiled: str = ""  # "model", as everybody does; "loss": model and loss in one graph
    model: Mapping[str, Any] = field(default_factory=dict)  # options of the model
    liger: bool = False
    auto_chunker: bool = False
    bf16_weights: bool = False  # by hand: weights in bf16 alone, and no autocast


@dataclass(frozen=True)
class Case:
    """A model, its batches of (B, T) tokens, and the rows to compare."""

    build: Callable[..., nn.Module]
    loss: Callable[[nn.Module, Tensor], Any]
    rows: Sequence[Row]
    batch: int
    context: int
    vocabulary: int
    steps: int  # timed steps of a turn
    turns: int
    optimizer: Callable[..., torch.optim.Optimizer] | None = None


def adamw(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    """Make the optimizer that most scripts have."""
    return torch.optim.AdamW(model.parameters(), RATE, BETAS, weight_decay=DECAY, **how)


# nanoGPT


def build_nanogpt(tiny: bool, file: str) -> nn.Module:
    """Import nanoGPT's model.py from a file and make its GPT of 124 million weights."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise UserError(f"There is no {file}.", "Give nanoGPT's model.py as --nanogpt FILE.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    size = (2, 2, 64, 512, 64) if tiny else (12, 12, 768, 50_304, 1024)
    names = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")
    config = module.GPTConfig(**dict(zip(names, size, strict=True)), dropout=0.0, bias=False)
    gpt: nn.Module = module.GPT(config)
    return gpt


def nanogpt_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of the next token, as nanoGPT's train.py takes it."""
    loss: Tensor = model(tokens, tokens.roll(-1, 1))[1]
    return loss


def nanogpt_optimizer(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    """Make nanoGPT's optimizer, which is fused by itself on a GPU."""
    device = next(model.parameters()).device.type
    made: torch.optim.Optimizer = model.configure_optimizers(DECAY, RATE, BETAS, device)  # type: ignore[operator]
    return made


# Hugging Face's models


def build_llama(tiny: bool) -> nn.Module:
    """Make a Llama of the shape of Llama-3.2-1B with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

    V, D, inner, layers, heads, shared = 128_256, 2048, 8192, 16, 32, 8
    if tiny:
        V, D, inner, layers, heads, shared = 512, 64, 128, 2, 4, 2
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=shared, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, rms_norm_eps=1e-5,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def build_qwen(tiny: bool, experts: str = "eager") -> nn.Module:
    """Make the Qwen2-MoE of flagship_peers.py, its experts by transformers' implementation."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    width, inner, layers, heads = (64, 64, 2, 4) if tiny else (768, 2048, 12, 12)
    config = Qwen2MoeConfig(
        vocab_size=256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, decoder_sparse_step=1,
        moe_intermediate_size=inner, shared_expert_intermediate_size=inner, num_experts=8,
        num_experts_per_tok=2, use_cache=False, attn_implementation="sdpa",
        experts_implementation=experts,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


def labelled_loss(model: nn.Module, tokens: Tensor) -> Any:
    """Return the model's own loss."""
    return model(input_ids=tokens, labels=tokens).loss


CASES = {
    "nanogpt": Case(
        build_nanogpt,
        nanogpt_loss,
        (
            Row("by hand", compiled="model"),
            Row("by hand, auto_chunker", compiled="loss", auto_chunker=True),
            Row("bf16", FAST.replace("-weights,optimizer=one-pass", ",optimizer=fused")),
            Row("bf16-weights, graph", GRAPH),
            Row("norms, graph", GRAPH.replace("=all", "=all+norm")),
            Row("no substitution, graph", GRAPH.replace("substitute=all,", "")),
            Row("autotuned, graph", f"{GRAPH},compile.mode=max-autotune-no-cudagraphs"),
        ),
        batch=16, context=1024, vocabulary=50_304, steps=12, turns=5, optimizer=nanogpt_optimizer,
    ),
    "llama": Case(
        build_llama,
        labelled_loss,
        (
            Row("by hand", compiled="model"),
            # Under autocast Liger 0.8.5 does not compile: the addmm of its head gets two dtypes. So
            # it is compiled with all weights in bf16, which is cheaper than what the other rows do
            # (no fp32 weights, half the optimizer's bytes), and by hand the same stands beside it.
            Row("Liger, compiled, bf16 weights", compiled="model", liger=True, bf16_weights=True),
            Row("by hand, bf16 weights", compiled="model", bf16_weights=True),
            Row("Liger, uncompiled", liger=True),
            Row("bf16-weights", FAST),
            Row("norms", FAST.replace("=all", "=all+norm")),
        ),
        batch=4, context=4096, vocabulary=128_256, steps=4, turns=3,
    ),
    "qwen": Case(
        build_qwen,
        labelled_loss,
        (
            Row("eager experts"),
            Row("grouped_mm experts", model=GROUPED),
            Row("grouped_mm experts, compiled", compiled="model", model=GROUPED),
            Row("fused", MIXTURE),
            Row("fused, elementwise again", f"{MIXTURE},checkpointing=elementwise"),
        ),
        batch=16, context=4096, vocabulary=256, steps=3, turns=3,
    ),
}  # fmt: skip

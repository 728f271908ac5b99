"""Models to measure the large mixture against: steplab bench step benchmarks/flagship_peers.py:NAME

`routed` is our own model whose router is overruled, so that the load of the experts is as asked.
`qwen2_moe` is Hugging Face's mixture of equal size and FLOPs (needs transformers).
"""

# T tokens, K chosen experts, E experts
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported, UserError
from steplab.data.random_batches import random_walks
from steplab.modules.experts import Router
from steplab.workloads.workload import find_workload

# Share of each expert, as weights over the experts in turn.
ROUTINGS = {"balanced": (1, 1), "skewed": (2, 1), "collapsed": (1,)}
TOKENS = 4096


def assignments(routing: str, tokens: int, chosen: int, experts: int) -> Tensor:
    """Return (T, K) int64: experts drawn by the weights of `routing`, no token twice to one.

    `collapsed`: every token goes to the first K experts, so that E - K have no rows at all.
    """
    if routing not in ROUTINGS:
        raise UserError(f"There is no routing {routing!r}.", f"Use {', '.join(ROUTINGS)}.")
    if routing == "collapsed":
        return torch.arange(chosen).repeat(tokens, 1)
    weights = ROUTINGS[routing]
    shares_E = torch.tensor([float(weights[e % len(weights)]) for e in range(experts)])
    generator = torch.Generator(device=shares_E.device).manual_seed(0)
    return torch.multinomial(shares_E.expand(tokens, experts), chosen, generator=generator)


def overrule(router: Router, routing: str, tokens: int) -> None:
    """Let the router choose what `routing` says; weights stay its own probabilities."""
    # A buffer, so that a compiled block and a CUDA graph take it for what it is.
    forced_TK = assignments(routing, tokens, router.chosen, router.weight.shape[0])
    router.register_buffer("forced_TK", forced_TK, persistent=False)

    def replaced(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        probabilities_TE, _, _, *rest = outputs
        experts_TK: Tensor = module.forced_TK  # type: ignore[assignment]
        return (probabilities_TE, probabilities_TE.gather(1, experts_TK), experts_TK, *rest)

    router.register_forward_hook(replaced)


def routed(size: str = "flagship", routing: str = "skewed", batch: int = 16) -> steplab.UserModel:
    """Our mixture with a given load of its experts, for steps of `batch` windows."""
    entry = find_workload("tsmoe")
    workload = entry.open(entry.resolve(size, {}))
    model = workload.model()
    for module in list(model.modules()):
        if isinstance(module, Router):
            overrule(module, routing, workload.tokens(batch))
    points = entry.presets[size].seq_max_len
    device = torch.get_default_device()

    def batches(batch: int) -> Iterator[Any]:
        return random_walks(batch, points + 1, device, seed=42)

    return steplab.UserModel(model, batches, workload.loss, points, optimizer=workload.optimizer)


def qwen2_moe(
    width: int = 768, layers: int = 12, inner: int = 2048, experts: str = "eager"
) -> steplab.UserModel:
    """Qwen2-MoE: SwiGLU of inner width 2048 has the FLOPs of our two matrices of 3072.

    `experts` is transformers' `experts_implementation`. Its own choice, `grouped_mm`, is slower
    here: autocast does not know that op, so the experts multiply in fp32.
    """
    try:
        from transformers import (  # type: ignore[import-not-found]
            Qwen2MoeConfig,
            Qwen2MoeForCausalLM,
        )
    except ImportError:
        raise Unsupported(
            "The peer is Hugging Face's, and transformers is not installed.",
            "pip install transformers",
        ) from None
    config = Qwen2MoeConfig(
        vocab_size=256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=12, decoder_sparse_step=1,
        moe_intermediate_size=inner, shared_expert_intermediate_size=inner, num_experts=8,
        num_experts_per_tok=2, use_cache=False, attn_implementation="sdpa",
        experts_implementation=experts,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(config)

    def batches(batch: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(42)
        while True:
            yield torch.randint(256, (batch, TOKENS), generator=generator)

    def loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens_BT, labels=tokens_BT).loss
        return found

    return steplab.UserModel(model, batches, loss, TOKENS)

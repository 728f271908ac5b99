"""Parameters and FLOPs of HYDRA by formula. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from steplab.core import Mode, Work
from steplab.costs.op_flops import PASSES, Decoder, decoder_work
from steplab.workloads.hydra.config import KERNEL, HydraConfig


def convolution_parameters(config: HydraConfig) -> tuple[int, int]:
    """Return (weights of matrix products, weights of sums over time alone) of one block."""
    width, head = config.latent + config.kv_width, config.head_width
    within = KERNEL * width * head
    if config.attention == "paper":
        return within, KERNEL * width
    return within + KERNEL * (config.latent**2 + config.kv_width**2), 0


def parameters(config: HydraConfig) -> int:
    """All parameters; the head is the embedding."""
    width, passes = config.width, config.recursions
    temperatures = config.kv_heads if config.attention == "paper" else 1
    attention = _projections(config) + sum(convolution_parameters(config)) + temperatures
    vectors = 3 * width + 2 * passes * width + width + 1  # norms, offsets, router of the depth
    block = attention + 3 * width * config.ff_width + vectors
    routers = config.mod_blocks * (width + 1)
    return config.blocks * block + routers + config.vocab_size * width + width


def feed_forward_passes(config: HydraConfig) -> float | None:
    """Return passes of one token through feed-forwards, all blocks; None: it depends on the data.

    What is computed and then masked counts too.
    """
    if config.mor == "packed":
        return None
    tokens = config.context
    sizes = [tokens] * config.recursions
    if config.mor == "capacity":
        sizes = list(config.pass_sizes(tokens))
    routed = [config.taken(size) for size in sizes] if config.mod == "top-k" else sizes
    plain_blocks = config.blocks - config.mod_blocks
    return (plain_blocks * sum(sizes) + config.mod_blocks * sum(routed)) / tokens


def matmul_parameters(config: HydraConfig) -> int | None:
    """Weights that enter matrix products, each as often as a token meets it, on average."""
    passes = feed_forward_passes(config)
    if passes is None:
        return None
    attention = _projections(config) + convolution_parameters(config)[0]
    total = config.blocks * attention + config.vocab_size * config.width
    return total + round(passes * 3 * config.width * config.ff_width)


def work(config: HydraConfig, batch: int, mode: Mode, ran: Mapping[str, str]) -> Work | None:
    """FLOPs of one micro-batch; None where they depend on the data."""
    active = matmul_parameters(config)
    if active is None:
        return None
    shape = (config.context, config.blocks, config.heads, config.head_width)
    found = decoder_work(Decoder(*shape, active), batch, mode, ran.get("attention", ""))
    assert found.hardware is not None
    extra = 2.0 * _zeros(config) * found.tokens * PASSES[mode]
    if PASSES[mode] == 3 and config.mor != "fixed" and "chunked" in ran.get("cross_entropy", ""):
        extra += 2.0 * config.vocab_size * config.width * found.tokens  # logits, once more
    formula = (
        f"{2 * PASSES[mode]} x {active:,} multiplied weights per token (shared ones once per pass) "
        "+ attention over visible pairs"
    )
    return replace(found, hardware=found.hardware + extra, formula=formula)


def _projections(config: HydraConfig) -> int:
    return config.width * (2 * config.latent + 2 * config.kv_width)


def _zeros(config: HydraConfig) -> int:
    """Weights between heads that are 0 and multiplied all the same, of all blocks."""
    dense = KERNEL * (config.latent + config.kv_width) ** 2
    products = 2 if config.attention == "hydra" else 1
    return config.blocks * (products * dense - convolution_parameters(config)[0])

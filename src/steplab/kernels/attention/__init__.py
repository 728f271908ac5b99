"""Scaled dot-product attention over (B, H, T, D) tensors.

Every implementation offers `attention(inputs)` and, unless it takes everything, `refuse(inputs)`.

The library kernels are called by their own aten op, not through `sdpa_kernel`: a backend chosen by
that context is not part of Inductor's cache key, so a second compile of the same graph could take
the first one's backend.
"""

# B batch, H heads, T queries, S keys, D head width
from __future__ import annotations

import torch
from torch import Tensor

from steplab.core.errors import UserError
from steplab.kernels.attention._inputs import AttentionInputs
from steplab.kernels.dispatch import load_all, select

__all__ = ["AttentionInputs", "attention", "choose"]

IMPLS = load_all("attention")

# Forward and backward on an H200, bf16, B16 H12 T4096 causal (benchmarks/attention_h200.md): with
# D64 triton_flash 3.47 ms, cuDNN 3.57, flash 5.56; with D128 6.35, 5.65, 9.70. So cuDNN: never far
# behind, and its host needs a third of the time. cuDNN and flash take 16-bit inputs only; flash
# also runs on CPU. triton_flash takes what they refuse (documents, shared heads).
PREFERENCE = ("cudnn", "flash", "efficient", "triton_flash", "math", "reference")
# cuDNN is slower with narrow heads: B4 H12 T4096 D32, forward and backward in a replayed step on an
# H200, 0.93 ms by cuDNN and 0.75 by triton_flash. With as many pairs or more, the GPU takes as long
# as the host needs for the launches. Other cards than Hopper have not been measured.
NARROW_HEADS = ("triton_flash", *PREFERENCE)
NARROW, MANY_PAIRS = 32, 4 * 12 * 4096**2


def choose(
    impl: str,
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    causal: bool,
    documents_BS: Tensor | None = None,
) -> str:
    """Return the implementation to run. `auto` takes the first that accepts the inputs.

    Which is asked first depends on shapes and card alone.
    """
    if documents_BS is not None and documents_BS.shape != (k_BHSD.shape[0], k_BHSD.shape[2]):
        raise UserError(
            f"documents has the shape {tuple(documents_BS.shape)}, but there are "
            f"{k_BHSD.shape[0]} sequences of {k_BHSD.shape[2]} keys.",
            "Give one document id per key.",
        )
    inputs = AttentionInputs(q_BHTD, k_BHSD, v_BHSD, causal, documents_BS)
    return select("attention", IMPLS, _preference(inputs), impl, inputs)


def _preference(inputs: AttentionInputs) -> tuple[str, ...]:
    (B, H, T, D), S = inputs.q_BHTD.shape, inputs.k_BHSD.shape[2]
    if not inputs.q_BHTD.is_cuda or D > NARROW or B * H * T * S < MANY_PAIRS:
        return PREFERENCE
    hopper = torch.cuda.get_device_capability(inputs.q_BHTD.device) == (9, 0)
    return NARROW_HEADS if hopper else PREFERENCE


def attention(
    impl: str,
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    causal: bool,
    documents_BS: Tensor | None = None,
) -> Tensor:
    """Return (B, H, T, D) by exactly the implementation named (not `auto`)."""
    inputs = AttentionInputs(q_BHTD, k_BHSD, v_BHSD, causal, documents_BS)
    out_BHTD: Tensor = IMPLS[impl].attention(inputs)
    return out_BHTD

"""Scaled dot-product attention over (B, H, T, D) tensors.

Every implementation file offers `attention(q, k, v, causal)` and `refuse(q, k, v, causal)`, which
returns the reason why it cannot take these inputs, or "". The library kernels are called by their
own aten op, not through `sdpa_kernel`: a backend chosen by that context is not part of Inductor's
cache key, so a second compile of the same graph could take the first one's backend.
"""

# B batch, H heads, T queries, S keys, D head width
from __future__ import annotations

from torch import Tensor

from steplab.errors import Unsupported
from steplab.kernels.impl import AUTO, impls, load

# Loaded once, so that torch.compile traces plain dictionary look-ups.
IMPLS = {name: load("attention", name) for name in impls("attention")}

# Fastest first by earlier H200 timings, not repeated with this code (bf16, B16 H12 T4096 D64,
# forward: cuDNN 0.96 ms, flash 1.58 ms, efficient 3.26 ms). cuDNN and flash take 16-bit inputs
# only; flash also runs on CPU.
PREFERENCE = ("cudnn", "flash", "efficient", "math")


def choose(impl: str, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> str:
    """Return the implementation to run. `auto` takes the first that accepts the inputs."""
    if impl == AUTO:
        for name in PREFERENCE:
            if not IMPLS[name].refuse(q_BHTD, k_BHSD, v_BHSD, causal):
                return name
        return "reference"
    reason = IMPLS[impl].refuse(q_BHTD, k_BHSD, v_BHSD, causal)
    if reason:
        raise Unsupported(f"attention {impl!r} {reason}.", "Use impl.attention=auto.")
    return impl


def attention(impl: str, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> Tensor:
    """Return (B, H, T, D) by exactly the implementation named (not `auto`)."""
    out_BHTD: Tensor = IMPLS[impl].attention(q_BHTD, k_BHSD, v_BHSD, causal)
    return out_BHTD

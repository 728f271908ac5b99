"""FlashAttention-2 in Triton: shared heads, documents, any length, any head width up to 256.

Tiles come from a fixed table, so that the same input always runs the same kernels;
`benchmarks/attention_tiles.py` measures others.
"""

# B batch, H query heads, G key heads, T queries, S keys, D head width
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steplab.kernels.attention._flash_kernels import (
    attention_dkdv_kernel,
    attention_dq_kernel,
    attention_forward_kernel,
)
from steplab.kernels.attention._flash_op import empty_as_BTHD, empty_lse, flash_op
from steplab.kernels.attention._inputs import AttentionInputs, refuse_for_flash
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    on_device_of,
    refuse_batch,
    refuse_device,
    refuse_dtype,
    tensor_descriptor,
    triton,
)

LOG2_E = math.log2(math.e)
NEEDS_GPU = True


@dataclass(frozen=True)
class Tiling:
    """One kernel's shape: `rows` that a program owns, `columns` of one step of its loop."""

    rows: int
    columns: int
    warps: int
    stages: int
    descriptors: bool = False  # tiles come by the copy engine (TMA) instead of by pointers
    registers: int | None = None  # the most per thread


@dataclass(frozen=True)
class Tilings:
    """The tilings of the three kernels, whose rows are queries, queries and keys."""

    forward: Tiling
    dq: Tiling
    dkdv: Tiling


# Small enough that short tests have several tiles, and rows and columns of different length.
INTERPRETED_TILINGS = Tilings(Tiling(32, 16, 1, 1), Tiling(16, 32, 1, 1), Tiling(32, 16, 1, 1))

# Keyed by bytes per element and padded head width. Compute capability 9.0 has the copy engine. The
# fastest of 81 on an H200, causal, 4096 tokens (benchmarks/attention_tiles_h200.txt), and for 32 of
# 27; a width of 256 has not been measured.
HOPPER = {
    (2, 32): Tilings(
        Tiling(64, 128, 4, 3, True), Tiling(64, 64, 4, 3, True), Tiling(64, 64, 4, 2, True, 128)
    ),
    (2, 64): Tilings(
        Tiling(64, 128, 4, 2, True), Tiling(64, 64, 4, 3, True), Tiling(64, 64, 4, 2, True, 168)
    ),
    (2, 128): Tilings(
        Tiling(64, 64, 4, 3, True), Tiling(128, 64, 8, 3, True), Tiling(64, 64, 4, 2, True)
    ),
    (2, 256): Tilings(
        Tiling(128, 64, 8, 2, True), Tiling(64, 32, 4, 2, True), Tiling(64, 32, 8, 2, True)
    ),
}

# All others, and fp32: within the 99 KiB of shared memory that the smaller cards have.
ANY = {
    (2, 64): Tilings(Tiling(128, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2)),
    (2, 128): Tilings(Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(64, 32, 8, 2)),
    (2, 256): Tilings(Tiling(64, 32, 8, 2), Tiling(32, 32, 4, 2), Tiling(32, 32, 8, 2)),
    (4, 64): Tilings(Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 2), Tiling(64, 16, 8, 2)),
    (4, 128): Tilings(Tiling(64, 16, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 16, 8, 2)),
    (4, 256): Tilings(Tiling(32, 16, 8, 2), Tiling(16, 16, 8, 2), Tiling(16, 16, 8, 2)),
}


def tilings_for(width: int, itemsize: int, capability: tuple[int, int] | None) -> Tilings:
    """Return the tilings for a padded head width and bytes per element.

    A capability of None means Triton's interpreter.
    """
    if capability is None:
        return INTERPRETED_TILINGS
    hopper, key = (itemsize, max(width, 32)), (itemsize, max(width, 64))
    return HOPPER[hopper] if capability == (9, 0) and hopper in HOPPER else ANY[key]


def padded_width(width: int) -> int:
    """Return the head width that a kernel computes with: a power of two, 16 or more."""
    return max(16, triton.next_power_of_2(width))


def tilings(q_BHTD: Tensor) -> Tilings:
    """Return the tilings for these inputs on their device."""
    width, itemsize = padded_width(q_BHTD.shape[-1]), q_BHTD.element_size()
    if INTERPRETED:
        return tilings_for(width, itemsize, None)
    return tilings_for(width, itemsize, torch.cuda.get_device_capability(q_BHTD.device))


def _describable(x: Tensor) -> bool:
    """Whether the copy engine can read `x`: dense rows at multiples of 16 bytes."""
    steps = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])]
    return x.stride(-1) == 1 and all(step > 0 and step % 16 == 0 for step in steps)


def _sources(
    tiling: Tiling, by_rows: Sequence[Tensor], by_columns: Sequence[Tensor]
) -> tuple[bool, list[Any]]:
    """Return whether tiles come by descriptors, and the descriptors or the tensors themselves.

    (B, H, T, D) is read `rows` or `columns` of T at a time. So is (B, H, T): by pointers, Triton
    3.6 lets every thread copy the whole line that it needs a part of, 16 copies per step.
    """
    lengths = [(x, tiling.rows) for x in by_rows] + [(x, tiling.columns) for x in by_columns]
    if not tiling.descriptors or not all(_describable(x) for x, _ in lengths):
        return False, [x for x, _ in lengths]
    blocks = [[1, 1, length, *map(padded_width, x.shape[3:])] for x, length in lengths]
    pairs = zip(lengths, blocks, strict=True)
    return True, [tensor_descriptor(x, block) for (x, _), block in pairs]


def _options(
    tiling: Tiling, descriptors: bool, q_BHTD: Tensor, k_BGSD: Tensor, mask: tuple[Any, ...]
) -> dict[str, Any]:
    """Return the constants of a kernel; `mask` is causal, first and past."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return {
        "SHARING": q_BHTD.shape[1] // k_BGSD.shape[1],
        "WIDTH": q_BHTD.shape[-1],
        "D": padded_width(q_BHTD.shape[-1]),
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "CAUSAL": mask[0],
        "DOCUMENTS": mask[1] is not None,
        "DESCRIPTORS": descriptors,
        "UPCAST": INTERPRETED,
        "PRECISION": "tf32" if tf32 else "ieee",
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        **({"maxnreg": tiling.registers} if tiling.registers else {}),
    }


def forward_by(
    tiling: Tiling, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *mask: Any
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, D) and the log-sum-exp of the scores in bits (B, H, T)."""
    B, H, T, D = q_BHTD.shape
    out_BHTD, lse_BHT = empty_as_BTHD(q_BHTD), empty_lse(q_BHTD)
    descriptors, (q, k, v) = _sources(tiling, [q_BHTD], [k_BGSD, v_BGSD])
    attention_forward_kernel[(triton.cdiv(T, tiling.rows), H, B)](
        q, k, v, out_BHTD, lse_BHT, *mask[1:], 
        *(x.stride() for x in (q_BHTD, k_BGSD, v_BGSD, out_BHTD)), T, k_BGSD.shape[2],
        LOG2_E / math.sqrt(D), **_options(tiling, descriptors, q_BHTD, k_BGSD, mask),
    )  # fmt: skip
    return out_BHTD, lse_BHT


def dq_by(
    tiling: Tiling,
    dout_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    *mask: Any,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dq, which is written into a tensor that is given, and delta = sum(out d_out)."""
    B, H, T, D = q_BHTD.shape
    dq_BHTD = empty_as_BTHD(q_BHTD) if into is None else into
    delta_BHT = torch.empty_like(lse_BHT)
    descriptors, (q, d_out, k, v) = _sources(tiling, [q_BHTD, dout_BHTD], [k_BGSD, v_BGSD])
    attention_dq_kernel[(triton.cdiv(T, tiling.rows), H, B)](
        q, k, v, out_BHTD, d_out, lse_BHT, delta_BHT, dq_BHTD, *mask[1:],
        *(x.stride() for x in (q_BHTD, k_BGSD, v_BGSD, out_BHTD, dout_BHTD, dq_BHTD)), T,
        k_BGSD.shape[2], LOG2_E / math.sqrt(D), 1 / math.sqrt(D),
        **_options(tiling, descriptors, q_BHTD, k_BGSD, mask),
    )  # fmt: skip
    return dq_BHTD, delta_BHT


def dkdv_by(
    tiling: Tiling,
    dout_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lse_BHT: Tensor,
    delta_BHT: Tensor,
    *mask: Any,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dk and dv, which are written into tensors that are given."""
    B, G, S, D = k_BGSD.shape
    dk_BGSD, dv_BGSD = into or (empty_as_BTHD(k_BGSD), empty_as_BTHD(v_BGSD))
    descriptors, (k, v, q, d_out, lse, delta) = _sources(
        tiling, [k_BGSD, v_BGSD], [q_BHTD, dout_BHTD, lse_BHT, delta_BHT]
    )
    attention_dkdv_kernel[(triton.cdiv(S, tiling.rows), G, B)](
        q, k, v, d_out, lse, delta, dk_BGSD, dv_BGSD, *mask[1:],
        *(x.stride() for x in (q_BHTD, k_BGSD, v_BGSD, dout_BHTD, dk_BGSD, dv_BGSD)),
        q_BHTD.shape[2], S, LOG2_E / math.sqrt(D), 1 / math.sqrt(D),
        **_options(tiling, descriptors, q_BHTD, k_BGSD, mask),
    )  # fmt: skip
    return dk_BGSD, dv_BGSD


def launch_forward(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *mask: Any
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp in bits; `mask` is causal, first and past."""
    with on_device_of(q_BHTD):
        return forward_by(tilings(q_BHTD).forward, q_BHTD, k_BGSD, v_BGSD, *mask)


def launch_backward(
    dout_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    *mask: Any,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv; `mask` is causal, first and past.

    They are written `into` three tensors of any strides, where these are given.
    """
    chosen, inputs = tilings(q_BHTD), (dout_BHTD, q_BHTD, k_BGSD, v_BGSD)
    dq, dkdv = (None, None) if into is None else (into[0], into[1:])
    with on_device_of(q_BHTD):
        dq_BHTD, delta_BHT = dq_by(chosen.dq, *inputs, out_BHTD, lse_BHT, *mask, into=dq)
        return dq_BHTD, *dkdv_by(chosen.dkdv, *inputs, lse_BHT, delta_BHT, *mask, into=dkdv)


def refuse(inputs: AttentionInputs) -> str:
    """Return why it cannot run, or ""."""
    q_BHTD = inputs.q_BHTD
    reason = refuse_device(q_BHTD) or refuse_batch(q_BHTD) or refuse_dtype(q_BHTD)
    if reason:
        return reason
    if not q_BHTD.numel():
        return "needs at least one query"
    if q_BHTD.shape[-1] > 256:
        return f"needs a head width of at most 256, not {q_BHTD.shape[-1]}"
    return refuse_for_flash(inputs)


attention = flash_op("triton_flash_attention", launch_forward, launch_backward)

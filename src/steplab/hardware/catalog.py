"""Peaks and bandwidths of cards, dense, each with its source. A card not listed is unknown.

Peaks are TFLOP/s with fp32 accumulation and without 2:4 sparsity; datasheets since Ampere print
the sparse number, twice as large, next to or instead of it. `fp32` is the rate of the ordinary
(SIMT) units, which is what fp32 matrix products use while TF32 is off. GeForce cards run 16-bit
products with fp32 accumulation at half the rate they are advertised with.

`source` names the document a value belongs to; what was compared with it differs. The bf16 peak and
the bandwidth were compared with a survey of datasheets for every card but those in FROM_MEMORY. All
fp32, tf32 and fp8 peaks, and everything of the cards in FROM_MEMORY, were entered from memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

TENSOR_DTYPES = ("bf16", "fp16", "tf32", "fp8")  # these have a 2:4-sparse mode; fp32 has none

FROM_MEMORY = (
    "V100 SXM2",
    "V100 PCIe",
    "T4",
    "RTX A6000",
    "L40",
    "RTX 6000 Ada",
    "GH200 96GB",
    "H200 NVL",
    "A10G",
)


class Board(NamedTuple):
    """What the driver tells of a card; all of it was entered from memory."""

    memory_gib: float
    capability: tuple[int, int]  # compute capability
    multiprocessors: int

    @property
    def memory_bytes(self) -> int:
        """Device memory."""
        return int(self.memory_gib * 2**30)


@dataclass(frozen=True)
class Card:
    """One product: the names its driver reports, its dense peaks and its memory bandwidth."""

    name: str
    pattern: str  # must match the whole device name, after an optional "NVIDIA " or "AMD "
    tflops: Mapping[str, float]  # dtype -> dense TFLOP/s
    bandwidth_gbs: float  # device memory, GB/s (10**9 bytes)
    source: str
    board: Board
    sparse: bool = True  # has 2:4 sparsity, so that a doubled peak is in circulation

    def provenance(self, dtype: str) -> str:
        """The source as printed beside a figure; says when the peak was entered from memory."""
        compared = self.name not in FROM_MEMORY and dtype in ("bf16", "fp16")
        return self.source if compared else f"{self.source}, entered from memory"

    def peak(self, dtype: str) -> float | None:
        """Dense TFLOP/s for "fp32", "tf32", "bf16", "fp16" or "fp8"; None if it has none."""
        return self.tflops.get(dtype)


def _peaks(fp32: float, tf32: float, half: float, fp8: float | None = None) -> dict[str, float]:
    peaks = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half}
    return peaks | ({"fp8": fp8} if fp8 else {})


_H100_SXM = _peaks(66.9, 494.7, 989.4, 1978.9)
_H100_NVL = _peaks(60.0, 417.5, 835.5, 1671.0)
_A100 = _peaks(19.5, 156.0, 312.0)

CARDS: tuple[Card, ...] = (
    Card("V100 SXM2", r"(Tesla )?V100-SXM2-(16|32)GB", {"fp32": 15.7, "fp16": 125.0}, 900,
         "NVIDIA V100 datasheet",
         Board(15.8, (7, 0), 80), sparse=False),
    Card("V100 PCIe", r"(Tesla )?V100-PCIE-(16|32)GB", {"fp32": 14.0, "fp16": 112.0}, 900,
         "NVIDIA V100 datasheet",
         Board(15.8, (7, 0), 80), sparse=False),
    Card("T4", r"(Tesla )?T4", {"fp32": 8.1, "fp16": 65.0}, 320, "NVIDIA T4 datasheet",
         Board(14.6, (7, 5), 40), sparse=False),
    Card("A100 40GB", r"A100-(SXM4|PCIE)-40GB", _A100, 1555, "NVIDIA A100 datasheet",
         Board(39.4, (8, 0), 108)),
    Card("A100 80GB SXM", r"A100-SXM4-80GB", _A100, 2039, "NVIDIA A100 datasheet",
         Board(79.2, (8, 0), 108)),
    Card("A100 80GB PCIe", r"A100 80GB PCIe", _A100, 1935, "NVIDIA A100 datasheet",
         Board(79.2, (8, 0), 108)),
    Card("A10", r"A10", _peaks(31.2, 62.5, 125.0), 600, "NVIDIA A10 datasheet",
         Board(22.0, (8, 6), 72)),
    Card("A10G", r"A10G", _peaks(31.5, 35.0, 70.0), 600,
         "NVIDIA A10G datasheet; 16-bit products at half the A10's rate per clock",
         Board(22.0, (8, 6), 80)),
    Card("RTX A6000", r"RTX A6000", _peaks(38.7, 77.4, 154.8), 768, "NVIDIA RTX A6000 datasheet",
         Board(47.5, (8, 6), 84)),
    Card("L4", r"L4", _peaks(30.3, 60.0, 121.0, 242.0), 300, "NVIDIA L4 datasheet",
         Board(22.0, (8, 9), 58)),
    Card("L40", r"L40", _peaks(90.5, 90.5, 181.0, 362.0), 864, "NVIDIA L40 datasheet",
         Board(44.4, (8, 9), 142)),
    Card("L40S", r"L40S", _peaks(91.6, 183.0, 362.0, 733.0), 864, "NVIDIA L40S datasheet",
         Board(44.4, (8, 9), 142)),
    Card("RTX 6000 Ada", r"RTX 6000 Ada Generation", _peaks(91.1, 182.1, 364.2, 728.5), 960,
         "NVIDIA RTX 6000 Ada datasheet",
         Board(47.4, (8, 9), 142)),
    Card("RTX 3090", r"GeForce RTX 3090", _peaks(35.6, 35.6, 71.2), 936,
         "NVIDIA GA102 whitepaper, fp32 accumulation",
         Board(23.7, (8, 6), 82)),
    Card("RTX 4090", r"GeForce RTX 4090", _peaks(82.6, 82.6, 165.2, 330.3), 1008,
         "NVIDIA Ada whitepaper, fp32 accumulation",
         Board(23.5, (8, 9), 128)),
    Card("RTX 5090", r"GeForce RTX 5090", _peaks(104.8, 104.8, 209.5, 419.0), 1792,
         "NVIDIA RTX Blackwell whitepaper, fp32 accumulation",
         Board(31.4, (12, 0), 170)),
    Card("H100 PCIe", r"H100 PCIe", _peaks(51.2, 378.0, 756.0, 1513.0), 2000,
         "NVIDIA H100 datasheet",
         Board(79.1, (9, 0), 114)),
    Card("H100 SXM5", r"H100 80GB HBM3", _H100_SXM, 3350, "NVIDIA H100 datasheet",
         Board(79.1, (9, 0), 132)),
    Card("H100 NVL", r"H100 NVL", _H100_NVL, 3900, "NVIDIA H100 NVL datasheet, per GPU",
         Board(93.1, (9, 0), 132)),
    Card("H200 SXM", r"H200", _H100_SXM, 4800, "NVIDIA H200 datasheet",
         Board(139.8, (9, 0), 132)),
    Card("H200 NVL", r"H200 NVL", _H100_NVL, 4800, "NVIDIA H200 datasheet",
         Board(139.8, (9, 0), 132)),
    Card("GH200 96GB", r"GH200 (480|120)GB", _H100_SXM, 4000, "NVIDIA GH200 datasheet, 96 GB HBM3",
         Board(94.5, (9, 0), 132)),
    Card("B200", r"B200", _peaks(75.0, 1125.0, 2250.0, 4500.0), 8000,
         "NVIDIA DGX B200 datasheet, per GPU",
         Board(178.4, (10, 0), 148)),
    Card("GB200", r"GB200", _peaks(80.0, 1250.0, 2500.0, 5000.0), 8000,
         "NVIDIA GB200 NVL72 datasheet, per GPU",
         Board(184.0, (10, 0), 152)),
    Card("MI300X", r"Instinct MI300X( VF)?", _peaks(163.4, 653.7, 1307.4, 2614.9), 5300,
         "AMD Instinct MI300X datasheet",
         Board(191.5, (9, 4), 304)),
)  # fmt: skip


def find_card(device_name: str) -> Card | None:
    """Return the card that a driver's device name stands for, or None when it is not listed.

    Laptop variants, MIG slices and vGPUs carry extra words in their names and so stay unknown:
    their peaks are not those of the full card.
    """
    bare = re.sub(r"^(NVIDIA|AMD)\s+", "", device_name.strip())
    for card in CARDS:
        if re.fullmatch(card.pattern, bare):
            return card
    return None


def sparse_peak_owner(tflops: float, dtype: str, present: Card | None = None) -> Card | None:
    """Return the card whose 2:4-sparse `dtype` peak `tflops` is, unless it is a dense peak.

    Where a card is present, only that one is asked: 362 is the dense bf16 peak of an L40S, but on
    an L40 it is the sparse one, and what an H100 NVL reaches says nothing about an H100 PCIe.
    """
    cards = _only(present) or CARDS
    if dtype not in TENSOR_DTYPES or any(_close(card.peak(dtype), tflops) for card in cards):
        return None
    for card in cards:
        if card.sparse and _close(2 * (card.peak(dtype) or 0.0), tflops):
            return card
    return None


def tensor_peak_name(tflops: float, present: Card | None = None) -> str:
    """Name the tensor-core peak that `tflops` is, unless it is an fp32 peak; "" if it is none.

    The present card is asked before all others.
    """
    for cards in (_only(present), CARDS):
        if any(_close(card.peak("fp32"), tflops) for card in cards):
            return ""
        for card in cards:
            for dtype in TENSOR_DTYPES:
                if _close(card.peak(dtype), tflops):
                    return f"{dtype} peak of the {card.name}"
                if card.sparse and _close(2 * (card.peak(dtype) or 0.0), tflops):
                    return f"sparse {dtype} peak of the {card.name}"
    return ""


def _only(card: Card | None) -> tuple[Card, ...]:
    return (card,) if card else ()


def _close(peak: float | None, tflops: float) -> bool:
    """Whether both are one number; 0.5 % covers rounding in datasheets (1979 for 1978.9)."""
    return peak is not None and abs(peak - tflops) <= 0.005 * tflops

"""Bytes and bandwidths of a collective, as nccl-tests defines them."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.studies.collectives.job import Dtype, Op

ITEM_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}


def message_elements(mib: float, dtype: Dtype, world: int) -> int:
    """Elements of the full message: `mib` MiB, rounded down to an equal part for every rank.

    The full message is the buffer of an all-reduce, the output of an all-gather, the input of a
    reduce-scatter, and what one rank sends in an all-to-all.
    """
    return int(mib * 2**20) // ITEM_BYTES[dtype] // world * world


def message_bytes(mib: float, dtype: Dtype, world: int) -> int:
    """Bytes of the full message."""
    return message_elements(mib, dtype, world) * ITEM_BYTES[dtype]


def bus_factor(op: Op, world: int) -> float:
    """Bytes that must pass the link of every rank, per byte of the message.

    An all-reduce is a reduce-scatter and an all-gather, so it counts twice.
    """
    share = (world - 1) / world
    return 2 * share if op == "all-reduce" else share


def algorithm_gbs(message: int, ms: float) -> float:
    """Message bytes over time, in GB/s (1 GB = 10**9 bytes)."""
    return message / ms / 1e6


def bus_gbs(op: Op, world: int, message: int, ms: float) -> float:
    """Bytes over the link of every rank per time, in GB/s: comparable with the hardware's peak."""
    return algorithm_gbs(message, ms) * bus_factor(op, world)


def slowest(rank_ms: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Per run, the time of the rank that took longest. `rank_ms` is indexed [rank][run]."""
    return tuple(max(run) for run in zip(*rank_ms, strict=True))

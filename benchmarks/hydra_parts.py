"""Parts of HYDRA's step by themselves: layouts, data, first calls. Called by hydra_notes.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hydra_cells import Desk
from torch import Tensor

from steplab.core import Cell, Column, RunSpec
from steplab.data.loader import Loader
from steplab.data.text import TextWindows, python_sources
from steplab.kernels.attention import attention
from steplab.step.assemble import assemble
from steplab.step.step import Step
from steplab.workloads.hydra.attention import convolutions
from steplab.workloads.hydra.config import PRESETS, HydraConfig

INSIDE, REPEATS = 20, 20  # calls per timing, timings


def layouts(desk: Desk) -> None:
    """Convolutions on sliced and contiguous channels, forms of the value shift, attention."""
    config, device = PRESETS["100m"], desk.device
    shape = (4, 1024, config.latent + 2 * config.kv_width)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu":
        shape = (1, 64, shape[-1])
    torch.manual_seed(0)
    z = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    ours = convolutions(config).to(device, dtype)
    for weight in ours.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    qk = config.latent + config.kv_width
    heads = config.heads + config.kv_heads
    weights = [torch.randn(qk, config.head_width, 3), torch.randn(qk, qk, 3)]
    first, second = (0.02 * w.to(device, dtype) for w in weights)

    def channels_first(x: Tensor) -> Tensor:
        y = F.conv1d(F.pad(x.mT.contiguous(), (2, 0)), first, groups=heads)
        return F.conv1d(F.pad(y, (2, 0)), second).mT.contiguous()

    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "ours, slice of the projection": lambda t: ours(t[..., :qk]),
        "ours, slice made contiguous first": lambda t: ours(t[..., :qk].contiguous()),
        "conv1d, slice of the projection": lambda t: channels_first(t[..., :qk]),
        "conv1d, slice made contiguous first": lambda t: channels_first(t[..., :qk].contiguous()),
    }
    half = config.kv_width // 2
    parts = (qk, half, half)
    shifts = {name: partial(_shift_of, form, parts) for name, form in SHIFTS.items()}
    _compare(desk, "Query and key convolutions", forms, z)
    _compare(desk, "Value shift", shifts, z)
    kernels = {"triton_flash, shared keys": partial(_attend, config, "triton_flash", 1)}
    for name in ("cudnn", "flash", "efficient"):
        repeated = config.heads // config.kv_heads
        kernels[f"{name}, keys repeated"] = partial(_attend, config, name, repeated)
    if device == "cuda":
        _compare(desk, "Attention of one block", kernels, z)


def _attend(config: HydraConfig, impl: str, repeated: int, z: Tensor) -> Tensor:
    kv = config.kv_width
    heads = (
        t.unflatten(-1, (-1, config.head_width)) for t in z.split((z.shape[2] - 2 * kv, kv, kv), -1)
    )
    q, k, v = (t.transpose(1, 2) for t in heads)
    if repeated > 1:
        k, v = (t.repeat_interleave(repeated, 1) for t in (k, v))
    return attention(impl, q, k, v, True)


def _shift_of(
    form: Callable[[Tensor, Tensor], Tensor], parts: tuple[int, ...], z: Tensor
) -> Tensor:
    _, now, late = z.split(parts, -1)
    return form(now, late)


def _empty_assign(now: Tensor, late: Tensor) -> Tensor:
    out = now.new_empty(*now.shape[:2], now.shape[2] + late.shape[2])
    out[..., : now.shape[2]] = now
    out[:, 0, now.shape[2] :] = 0
    out[:, 1:, now.shape[2] :] = late[:, :-1]
    return out


def _zeros_assign(now: Tensor, late: Tensor) -> Tensor:
    out = now.new_zeros(*now.shape[:2], now.shape[2] + late.shape[2])
    out[..., : now.shape[2]] = now
    out[:, 1:, now.shape[2] :] = late[:, :-1]
    return out


def _cat(now: Tensor, late: Tensor) -> Tensor:
    before = torch.cat([torch.zeros_like(late[:, :1]), late[:, :-1]], 1)
    return torch.cat([now, before], -1)


def _pad_cat(now: Tensor, late: Tensor) -> Tensor:
    return torch.cat([now, F.pad(late, (0, 0, 1, 0))[:, :-1]], -1)


def _roll_mask(now: Tensor, late: Tensor) -> Tensor:
    kept = (torch.arange(late.shape[1], device=late.device) > 0)[:, None]
    return torch.cat([now, late.roll(1, 1) * kept], -1)


SHIFTS = {
    "empty and three writes": _empty_assign,
    "zeros and two writes": _zeros_assign,
    "cat of cat": _cat,
    "cat of pad (ours)": _pad_cat,
    "roll and mask": _roll_mask,
}


def _compare(
    desk: Desk, title: str, forms: Mapping[str, Callable[[Tensor], Tensor]], z: Tensor
) -> None:
    """Time every form forward, and forward with backward to its input."""
    note = f"{tuple(z.shape)} {z.dtype}, median of {REPEATS} timings of {INSIDE} calls; on a GPU "
    note += "the calls are one CUDA graph, so the host does not count"
    columns = (Column("form"), Column("forward", "us"), Column("with backward", "us"))
    file = title.lower().replace(" ", "_")
    sheet = desk.sheet(file, title, (*columns, Column("status")), note)
    gradient = torch.randn_like(next(iter(forms.values()))(z))
    for name, form in forms.items():
        sheet.row(name, partial(_both_ways, form, z, gradient))


def _both_ways(
    form: Callable[[Tensor], Tensor], z: Tensor, gradient: Tensor
) -> tuple[float, float, str]:
    with torch.no_grad():
        forward = _microseconds(partial(form, z), z.device)
    return forward, _microseconds(partial(_with_backward, form, z, gradient), z.device), "ok"


def _with_backward(form: Callable[[Tensor], Tensor], z: Tensor, gradient: Tensor) -> None:
    torch.autograd.grad(form(z), z, gradient)


def _microseconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(INSIDE):
            call()
        return (time.perf_counter() - started) / INSIDE * 1e6
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(INSIDE):
            call()
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / INSIDE * 1e3)
    return sorted(found)[len(found) // 2]


def data(desk: Desk, spec: RunSpec) -> None:
    """One step fed by the same batch, by random tokens, and by bytes of files."""
    context = int(spec.config["context"])
    columns = (Column("data"), Column("step", "ms"), Column("fetch", "ms"), Column("tokens/s"))
    title = f"Synthetic and real tokens: {spec.size}, batch {spec.batch}, {context} tokens"
    sheet = desk.sheet("data", title, (*columns, Column("status")))
    step = assemble(spec)
    device = step.parts.device
    files = TextWindows(python_sources(held_out=False), context, context)
    with Loader(files, spec.batch, 0, device) as loader:
        random = step.workload.batches(spec.batch, device, 0)
        same = next(random)
        for name, source in (
            ("one batch again and again", iter(lambda: same, None)),
            ("random tokens", random),
            ("bytes of Python's sources", loader),
        ):
            sheet.row(name, partial(_fed, step, source, device, spec))


def _fed(
    step: Step, source: Iterator[Any], device: torch.device, spec: RunSpec
) -> tuple[Cell, ...]:
    """Return ms per step over all steps, the median ms that fetching took on the host, tokens/s."""
    waits, steps = [], spec.steps
    for _ in range(3):
        step([next(source)])
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(source)
        waits.append(time.perf_counter() - asked)
        step([batch])
    _synchronize(device)
    ms = (time.perf_counter() - started) / steps * 1e3
    speed = 1e3 * step.workload.tokens(spec.batch) / ms
    return ms, sorted(waits)[steps // 2] * 1e3, speed, "ok"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()

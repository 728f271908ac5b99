"""Times the kernels of the expert layers at the flagship's shapes on one GPU; about a minute.

    PYTHONPATH=src python benchmarks/experts_kernels.py [kernels] [layers] [inside]

65,536 tokens of width 768, 8 experts of inner width 3072 of which each token takes 2, bf16. A
kernel's other tiles are listed under it, the default one marked; one that fails or gives another
result is a row with its reason. Bytes are those that must move, so rows that are read twice from
the cache may exceed the memory's bandwidth.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F

from steplab.cli.flags import exit_without_gpu
from steplab.kernels import activation as activation_op
from steplab.kernels import grouped_mm as grouped_mm_op
from steplab.kernels.activation import _in_product as in_product
from steplab.kernels.activation import triton_rows
from steplab.kernels.experts import _rows as rows
from steplab.kernels.experts._rows import sort_rows
from steplab.kernels.router import triton_router as router
from steplab.modules.experts import MixtureOfExperts

T, K, E, D, INNER = 65_536, 2, 8, 768, 3072
R = T * K
# One network: the shared one of the flagship, nanoGPT's, and hydra's, routed and not.
DENSE = (
    (T, "gelu", INNER), (16_384, "gelu", INNER), (8192, "swiglu", 2304), (16_384, "swiglu", 2304)
)  # fmt: skip
LIMIT_S = 80.0  # rows after that are not run
GIB = 2**30
ROW_TILES = "2,256,4 4,256,4 8,256,4 16,256,4 32,256,4 4,256,2 8,256,8 16,256,8"
WIDE_TILES = "1,1024,4 2,1024,4 4,1024,4 2,512,4 4,512,4 1,1024,8 1,1024,2 2,1024,8 1,512,2"
ROUTER_TILES = "64,128,4,2 64,128,4,3 64,64,4,3 128,64,4,3 128,128,8,2 128,64,8,3 32,128,4,3"

START = time.monotonic()


def median_ms(run: Callable[[], Any], repeats: int = 12) -> float:
    """Return the median time of one call on the device."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def row(name: str, run: Callable[[], Any], work: float = 0.0, unit: str = "TB/s") -> Any:
    """Print one line; `work` is in bytes or FLOPs. Return the result of the call, or None."""
    if time.monotonic() - START > LIMIT_S:
        print(f"{name:44} not run: out of time")
        return None
    try:
        result, ms = run(), median_ms(run)
    except Exception as error:
        print(f"{name:44} failed: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        return None
    rate = f"{work / ms / 1e9:9.2f} {unit}" if work else ""
    print(f"{name:44} {ms:9.4f} ms {rate}", flush=True)
    return result


def alike(a: Any, b: Any) -> bool:
    """Whether two results are equal to bf16 rounding."""
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    return all(
        x is None or float((x.float() - y.float()).norm() / y.float().norm().clamp_min(1e-9)) < 4e-3
        for x, y in pairs
    )


def sweep(name: str, run: Callable[[Any], Any], default: Any, tiles: str, work: float) -> None:
    """Print the default tile, then every other one; a wrong result is told."""
    truth = row(f"{name} {tuple(default)} *", lambda: run(default), work)
    for text in tiles.split():
        tile = type(default)(*map(int, text.split(",")))
        if tile == default:
            continue
        found = row(f"{name} {tuple(tile)}", partial(run, tile), work)
        if found is not None and truth is not None and not alike(found, truth):
            print(f"{'':44} WRONG: differs from the default tile's result")


def normal(*shape: int) -> torch.Tensor:
    """Return random numbers in bf16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def time_rows(experts_TK: torch.Tensor) -> None:
    """Gather, add up, and the counting sort."""
    x_TD, y_RD = normal(T, D), normal(R, D)
    row_TK, source_R, _ = rows.launch_place(experts_TK, E)
    token_R = source_R // K
    moved = 2.0 * D * (R + R)
    row("torch: x[token]", lambda: x_TD[token_R], moved)
    sweep(
        "gather",
        lambda tile: rows.launch_gather(x_TD, source_R, K, tile),
        rows.GATHER,
        ROW_TILES,
        moved,
    )
    moved = 2.0 * D * (R + T)
    row("torch: y[row].sum(1)", lambda: y_RD[row_TK].sum(1), moved)
    sweep("add_up", lambda tile: rows.launch_sum(y_RD, row_TK, tile), rows.SUM, ROW_TILES, moved)
    row("torch: place (one-hot, running sum)", lambda: sort_rows(experts_TK, E))
    row("place", lambda: rows.launch_place(experts_TK, E))


def time_activations(experts_TK: torch.Tensor) -> None:
    """Forward and backward over (R, 3072), and swiglu at half that width."""
    _, source_R, _ = rows.launch_place(experts_TK, E)
    weights = activation_op.RowWeights(torch.rand(R, device="cuda"), source_R)
    z, dh = normal(R, INNER), normal(R, INNER)
    one = 2.0 * R * INNER
    row("torch: copy of (R, 3072)", lambda: torch.empty_like(z).copy_(z), 2 * one)
    row("torch: gelu forward, eager", lambda: F.gelu(z), 2 * one)

    def forward(tile: Any) -> Any:
        return triton_rows.forward(z, "gelu", weights, tile)

    def backward(tile: Any) -> Any:
        dh.copy_(z)  # it is written over; the copy is timed apart
        return triton_rows.backward(z, dh, "gelu", weights, tile)

    sweep("gelu forward", forward, triton_rows.FORWARD, WIDE_TILES, 2 * one)
    row("(a copy, which the backward's times include)", lambda: dh.copy_(z), 2 * one)
    sweep("gelu backward with a copy", backward, triton_rows.BACKWARD, WIDE_TILES, 6 * one)
    row(
        "gelu backward, in place",
        lambda: triton_rows.backward(z, dh, "gelu", weights),
        4 * one,
    )
    half = normal(R, INNER // 2)
    row("swiglu forward", lambda: triton_rows.forward(z, "swiglu", weights), 1.5 * one)
    row("swiglu backward", lambda: triton_rows.backward(z, half, "swiglu", weights), 3 * one)


def time_router() -> None:
    """Both kernels, the definition, and the gate's products by torch, which they spare."""
    from steplab.kernels.router.reference import router as reference

    inputs = x_TD, weight_ED, gate_1D = normal(T, D), normal(E, D) * 0.02, normal(1, D) * 0.02
    one = 2.0 * T * D
    row("torch: router forward, eager", lambda: reference(*inputs, K), one)
    row("torch: gate forward", lambda: F.linear(x_TD, gate_1D), one)
    default = router.tilings(weight_ED)
    sweep(
        "router forward",
        lambda tile: itemgetter(0, 1, 3)(router.launch_forward(*inputs, K, tile)),
        default[0],
        ROUTER_TILES,
        one,
    )
    p_TE, w_TK, experts_TK, gate_T1 = router.launch_forward(*inputs, K)
    slopes = torch.randn_like(p_TE), torch.randn_like(w_TK), torch.randn_like(gate_T1)
    d_T1 = slopes[2].to(x_TD.dtype)
    row("torch: gate dx", lambda: d_T1 @ gate_1D, one)
    row("torch: gate dw", lambda: d_T1.T @ x_TD, one)
    sweep(
        "router backward",
        lambda tile: router.launch_backward(*slopes, *inputs, p_TE, experts_TK, gate_T1, tile),
        default[1],
        ROUTER_TILES,
        2 * one,
    )


def time_products(experts_TK: torch.Tensor) -> None:
    """The six grouped products of a layer."""
    offsets_E = rows.launch_place(experts_TK, E)[2]
    x_RD, h_RF, w_EFD = normal(R, D), normal(R, INNER), normal(E, INNER, D)
    flops = 2.0 * R * D * INNER

    def product(x: Any, w: Any) -> Callable[[], Any]:
        return lambda: grouped_mm_op.grouped_mm("aten", x, w, offsets_E)

    def gradient(x: Any, dout: Any) -> Callable[[], Any]:
        return lambda: grouped_mm_op.weight_gradient("aten", x, dout, offsets_E)

    w_EDF = w_EFD.transpose(-2, -1).contiguous()
    row("grouped up: x w_in^T", product(x_RD, w_EFD.mT), flops, "TFLOP/s")
    row("grouped down: h w_out^T", product(h_RF, w_EDF.mT), flops, "TFLOP/s")
    row("grouped dh: d_out w_out", product(x_RD, w_EDF), flops, "TFLOP/s")
    row("grouped dx: dz w_in", product(h_RF, w_EFD), flops, "TFLOP/s")
    row("grouped dw_out: d_out^T h", gradient(x_RD, h_RF), flops, "TFLOP/s")
    row("grouped dw_in: dz^T x", gradient(h_RF, x_RD), flops, "TFLOP/s")


def time_inside(
    name: str,
    offsets_E: torch.Tensor,
    weights: activation_op.RowWeights,
    activation: str,
    inner: int,
) -> None:
    """Products with the activation in their kernels, beside a product and a pass."""
    count, groups = weights.values_R.shape[0], offsets_E.shape[0]
    wide = 2 * inner if activation == "swiglu" else inner
    x, z = normal(count, D), normal(count, wide)
    w_in, w_out = normal(groups, wide, D) * D**-0.5, normal(groups, D, inner) * D**-0.5
    inside, ends = in_product.IN_PRODUCT[activation], None if groups == 1 else offsets_E

    def product(w: torch.Tensor) -> torch.Tensor:
        if groups == 1:
            return x @ w[0]
        return grouped_mm_op.grouped_mm("aten", x, w, offsets_E)

    def forward_apart() -> Any:
        return triton_rows.forward(product(w_in.mT), activation, weights)

    def backward_apart() -> Any:
        return triton_rows.backward(z, product(w_out), activation, weights)

    up, down = 2.0 * count * D * wide, 2.0 * count * D * inner
    calls = {
        "up, then the activation": (forward_apart, up),
        "up with it": (
            lambda: in_product.forward_in_product(x, w_in, ends, inside, weights), up
        ),
        "dh, then dz and h": (backward_apart, down),
        "dh with dz and h": (
            lambda: in_product.backward_in_product(x, w_out, ends, z, inside, weights), down
        ),
    }  # fmt: skip
    for label, (call, flops) in calls.items():
        row(f"{name} {label}", call, flops, "TFLOP/s")


def time_layer(label: str, impls: dict[str, str], compiled: bool) -> None:
    """Forward and backward of a whole mixture layer, what it keeps and its peak."""
    if time.monotonic() - START > LIMIT_S:
        print(f"{label:44} not run: out of time")
        return
    try:
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        layer = MixtureOfExperts(D, INNER, INNER, E, K, "gelu").to("cuda", torch.bfloat16)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        for module in layer.modules():
            if hasattr(module, "op"):
                module.impl = impls.get(str(module.op), "auto")  # type: ignore[assignment]
        x, d_out = (normal(16, 4096, D) for _ in range(2))
        run = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
        _layer_row(label, run, layer, x.requires_grad_(), d_out)
    except Exception as error:
        print(f"{label:44} failed: {type(error).__name__}: {str(error).splitlines()[0][:90]}")


def _layer_row(label: str, run: Any, layer: Any, x: torch.Tensor, d_out: torch.Tensor) -> None:
    leaves = [x, *layer.parameters()]

    def forward() -> Any:
        return run(x)[0]

    def both() -> Any:
        return torch.autograd.grad(forward(), leaves, d_out)

    for _ in range(3):
        both()
    forward_ms, both_ms = median_ms(forward), median_ms(both)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = forward()
    kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, leaves, d_out)
    peak = torch.cuda.max_memory_allocated() - before
    flops = 2.0 * T * D * (2 * (K + 1) * INNER)
    print(
        f"{label:44} forward {forward_ms:7.3f} ms  backward {both_ms - forward_ms:7.3f} ms"
        f"  {3 * flops / both_ms / 1e9:5.0f} TFLOP/s  keeps {kept / GIB:5.2f} GiB"
        f"  peak {peak / GIB:5.2f} GiB",
        flush=True,
    )


def main() -> None:
    """Run the parts named, or all."""
    exit_without_gpu(__file__)
    parts = sys.argv[1:] or ["kernels", "layers", "inside"]
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    plain = {"router": "reference", "feed_forward": "reference"}
    if "layers" in parts:
        time_layer("layer: loop, eager", {**plain, "experts": "loop"}, False)
        time_layer("layer: grouped, eager", {**plain, "experts": "grouped"}, False)
        passes = {"experts": "fused", "feed_forward": "fused"}
        time_layer("layer: fused, eager", passes, False)
        time_layer("layer: gelu in the products, eager", {}, False)
        time_layer("layer: grouped, compiled", {**plain, "experts": "grouped"}, True)
        time_layer("layer: fused experts only, compiled", {**plain, "experts": "fused"}, True)
        time_layer("layer: fused, compiled", passes, True)
        time_layer("layer: gelu in the products, compiled", {}, True)
    odds = torch.tensor([2.0, 1, 1, 1, 1, 1, 0.5, 0.5], device="cuda").expand(T, -1)
    experts_TK = torch.multinomial(odds, K)
    if "inside" in parts:
        _, source_R, offsets_E = rows.launch_place(experts_TK, E)
        weights_R = torch.rand(R, device="cuda")
        routed = activation_op.RowWeights(weights_R, source_R)
        for activation in ("gelu", "swiglu"):
            time_inside(f"grouped {activation}", offsets_E, routed, activation, INNER)
        for count, activation, inner in DENSE:
            one, weights = offsets_E.new_full((1,), count), weights_R[:count].clone()
            label = f"{count:,} rows {activation}"
            time_inside(label, one, activation_op.RowWeights(weights), activation, inner)
    if "kernels" in parts:
        time_products(experts_TK)
        time_activations(experts_TK)
        time_rows(experts_TK)
        time_router()
    print(f"{time.monotonic() - START:.0f} s")


if __name__ == "__main__":
    main()

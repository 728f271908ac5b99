"""Every implementation of every op at the shapes it was made for, against fp64:

    PYTHONPATH=src python benchmarks/kernel_accuracy.py [OP ...] [--out FILE]

A kernel may be right at the small shapes of the tests and wrong at 65,536 tokens: an offset beyond
31 bits, a tile that small inputs never fill, a race that few blocks never lose. Here outputs and
gradients are compared at the shapes of the mixture's flagship, gpt xl, HYDRA 100m and Megalodon
200m, tile by tile, with the budgets of `steplab bench OP`. Those of `fp8` are 9 % of the whole
tensor: a gradient goes through two roundings to e4m3. About three minutes on an H200. `--tiny
--device cpu` tries the script anywhere, with TRITON_INTERPRET=1 the Triton kernels too.
"""

# B batch, T tokens, R rows, D width, F inner width, E experts, K chosen, H heads, S rows, N modes
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steplab.bench.op_accuracy import Accuracy, check_accuracy
from steplab.bench.op_bench import OpBench
from steplab.bench.op_cell import measure_cell
from steplab.bench.op_results import ERRORS
from steplab.cli.command import Parser
from steplab.core import Column, RunSpec, Table, registry
from steplab.core.errors import SteplabError, Unsupported, UserError, did_you_mean
from steplab.core.table import Cell
from steplab.kernels import (
    activation,
    adamw,
    embedding,
    feed_forward,
    grouped_mm,
    layer_norm,
    rms_norm,
    rotary,
    router,
    stream_norm,
    timestep_norm,
    top_rows,
)
from steplab.kernels.dispatch import impls, needs_gpu, ops
from steplab.kernels.triton_runtime import INTERPRETED
from steplab.probes.environment import capture_environment
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.step.assemble import find_device
from steplab.step.failures import first_sentence

Results = Mapping[str, Tensor]
COLUMNS = (
    Column("op"),
    Column("shape"),
    Column("impl"),
    Column("worst result"),
    Column("error"),
    Column("budget"),
    Column("of budget"),
    Column("verdict"),
)
WRONG = "WRONG"
TINY = 64  # the divisor of tokens with --tiny
# Two orders of a sum in fp32 drift apart by one rounding times the root of its terms; the peer's
# order, pairwise, is the best there is, so its own error says too little.
SUM_UNIT = 2.0**-24
FP8, FP8_BUDGET = "fp8", 0.09

# Ops with a benchmark of their own: what differs from the defaults of `steplab bench NAME`.
BENCHES: tuple[tuple[str, str, dict[str, list[Any]]], ...] = (
    ("attention", "flagship", {"batch": [16], "heads": [12], "context": [4096]}),
    ("attention", "gpt xl", {"batch": [16], "heads": [25], "context": [1024]}),
    (
        "attention",
        "hydra 100m",
        {"batch": [16], "heads": [12], "context": [1024], "head_width": [16]},
    ),
    ("loss", "gpt xl", {"tokens": [16384], "width": [1600], "vocabulary": [10_000]}),
    ("loss", "hydra 100m", {"tokens": [16384], "width": [768], "vocabulary": [50_257]}),
    ("experts", "flagship", {"tokens": [65536]}),
    ("ema", "megalodon 200m", {"batch": [4], "context": [4096], "width": [1024], "modes": [16]}),
)
TINY_BENCH = {"context": [64], "tokens": [256], "batch": [1], "vocabulary": [1000]}


class Case(NamedTuple):
    """An op without a benchmark: the tensors it is given, and how an implementation takes them."""

    shape: str
    inputs: dict[str, Tensor]
    run: Callable[[str, dict[str, Tensor]], Results]  # implementation, inputs -> results
    terms: int  # of the longest sum in fp32, or as many roundings as follow one another
    definition: str = "reference"


class Rows:
    """Random tensors of one device, with token counts divided where the script is only tried."""

    def __init__(self, device: torch.device, divisor: int) -> None:
        self.device, self.divisor = device, divisor
        self.generator = torch.Generator(device).manual_seed(42)

    def count(self, rows: int) -> int:
        """Return so many rows, or fewer."""
        return rows // self.divisor

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1) -> Tensor:
        """Return normal numbers of size `scale`."""
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return (x * scale).to(dtype)

    def order(self, rows: int) -> Tensor:
        """Return a permutation of the rows."""
        return torch.randperm(rows, generator=self.generator, device=self.device)


def differentiated(outputs: Results, inputs: Results, douts: Results) -> Results:
    """Return the outputs with the gradients of those inputs that want one, as `d<name>`."""
    wanted = {name: x for name, x in inputs.items() if x.requires_grad}
    if not wanted:
        return outputs
    kept = {name: out for name, out in outputs.items() if name in douts and out.requires_grad}
    given = [douts[name].to(out.dtype) for name, out in kept.items()]
    gradients = torch.autograd.grad(list(kept.values()), list(wanted.values()), given)
    names = [f"d{name}" for name in wanted]
    plain = {name: out.detach() for name, out in outputs.items()}
    return {**plain, **dict(zip(names, gradients, strict=True))}


def activation_case(rows: Rows, shape: str, count: int, inner: int, kind: str) -> Case:
    """Rows of routed experts or of a feed-forward: weighted forward and backward."""
    R, F = rows.count(count), inner
    inputs = {
        "z": rows.normal(R, F * (2 if kind == "swiglu" else 1)),
        "dh": rows.normal(R, F),
        "weights": rows.normal(R, dtype=torch.float32).abs(),
    }
    source_R = rows.order(R).int()

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        weights = activation.RowWeights(given["weights"], source_R)
        h_RF = activation.forward(impl, given["z"], kind, weights)
        dz, again_RF, dweights_R = activation.backward(
            impl, given["z"], given["dh"].clone(), kind, weights
        )
        assert dweights_R is not None
        return {"out": h_RF, "dz": dz, "h again": again_RF, "dweights": dweights_R}

    return Case(f"{shape}: {R} x {F} {kind}", inputs, run, terms=F)


def adamw_case(rows: Rows, shape: str, numbers: tuple[int, ...], rounded: bool) -> Case:
    """One update with a clip; `rounded` weights have an fp32 master."""
    exact = rows.normal(*numbers, dtype=torch.float32, scale=0.02)
    inputs = {
        "master": exact,
        "grad": rows.normal(*numbers, dtype=torch.bfloat16 if rounded else torch.float32),
        "exp_avg": rows.normal(*numbers, dtype=torch.float32),
        "exp_avg_sq": rows.normal(*numbers, dtype=torch.float32).square(),
    }

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        mine = {name: x.clone() for name, x in given.items()}
        wide = mine["master"].dtype
        step = torch.tensor(7.0, device=rows.device)
        lr = torch.tensor(1e-3, dtype=torch.float64, device=rows.device)
        clip = torch.tensor(0.37, dtype=wide, device=rows.device)
        low = torch.float64 if wide == torch.float64 else torch.bfloat16
        param = mine["master"].to(low) if rounded else mine["master"]
        state = adamw.ParameterState(
            param,
            mine["master"] if rounded else None,
            mine["grad"],
            mine["exp_avg"],
            mine["exp_avg_sq"],
            step,
        )
        adamw.update(impl, state, adamw.Hyperparameters(0.9, 0.95, 1e-8, 0.1), lr, clip)
        moments = {"exp_avg": mine["exp_avg"], "exp_avg_sq": mine["exp_avg_sq"]}
        return {"param": param, "master": mine["master"], **moments}

    words = "bf16 with masters" if rounded else "fp32"
    return Case(f"{shape}: {' x '.join(map(str, numbers))} {words}", inputs, run, terms=16)


def feed_forward_case(
    rows: Rows, shape: str, count: int, width: int, inner: int, kind: str, weighted: bool
) -> Case:
    """The network of a block, or the shared expert, whose rows are `weighted`."""
    T, D, F = rows.count(count), width, inner
    inputs = {
        "x": rows.normal(T, D).requires_grad_(),
        "w_in": rows.normal(F * (2 if kind == "swiglu" else 1), D, scale=D**-0.5).requires_grad_(),
        "w_out": rows.normal(D, F, scale=F**-0.5).requires_grad_(),
    }
    if weighted:
        inputs["weights"] = rows.normal(T, 1).abs().requires_grad_()
    douts = {"out": rows.normal(T, D)}

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        layer = given["x"], given["w_in"], given["w_out"]
        taken = feed_forward.choose(impl, *layer)
        out = feed_forward.feed_forward(taken, *layer, kind, given.get("weights"))
        return differentiated({"out": out}, given, douts)

    return Case(f"{shape}: {T} x {D} x {F} {kind}", inputs, run, terms=max(T, F))


def grouped_case(
    rows: Rows, shape: str, count: int, width: int, inner: int, trained: bool = True
) -> Case:
    """Products of uneven groups, one of them empty."""
    R, D, F = rows.count(count), width, inner
    shares = torch.tensor([0.3, 0.0, 0.2, 0.15, 0.05, 0.1, 0.12, 0.08])
    ends_E = (shares.cumsum(0) * R).round().int()
    ends_E[-1] = R
    offsets_E = ends_E.to(rows.device)
    inputs = {
        "x": rows.normal(R, D).requires_grad_(trained),
        "w": rows.normal(len(shares), D, F, scale=D**-0.5).requires_grad_(trained),
    }
    douts = {"out": rows.normal(R, F)}

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        with torch.set_grad_enabled(trained):
            taken = grouped_mm.choose(impl, given["x"], given["w"])
            out = grouped_mm.grouped_mm(taken, given["x"], given["w"], offsets_E)
        return differentiated({"out": out}, given, douts)

    words = f"{shape}: {R} x {D} x {F} in {len(shares)} groups"
    return Case(words, inputs, run, terms=max(R, F), definition="loop")


def rms_norm_case(rows: Rows, shape: str, count: int, width: int) -> Case:
    """An fp32 stream, an update in bf16, the norm in bf16."""
    T, D = rows.count(count), width
    inputs = {
        "x": rows.normal(T, D, dtype=torch.float32).requires_grad_(),
        "weight": rows.normal(D, dtype=torch.float32).requires_grad_(),
        "added": rows.normal(T, D).requires_grad_(),
    }
    douts = {"normed": rows.normal(T, D), "stream": rows.normal(T, D, dtype=torch.float32)}

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        x, weight, added = given.values()
        dtype = torch.float64 if x.dtype == torch.float64 else torch.bfloat16
        normed, stream = rms_norm.rms_norm(impl, x, weight, 1e-6, added, dtype)
        return differentiated({"normed": normed, "stream": stream}, given, douts)

    return Case(f"{shape}: {T} x {D}", inputs, run, terms=max(T, D))


def layer_norm_case(rows: Rows, shape: str, count: int, width: int) -> Case:
    """The same with a mean and a bias, on a stream far from zero."""
    T, D = rows.count(count), width
    inputs = {
        "x": (rows.normal(T, D, dtype=torch.float32) + 2).requires_grad_(),
        "weight": rows.normal(D, dtype=torch.float32).requires_grad_(),
        "bias": rows.normal(D, dtype=torch.float32).requires_grad_(),
        "added": rows.normal(T, D).requires_grad_(),
    }
    douts = {"normed": rows.normal(T, D), "stream": rows.normal(T, D, dtype=torch.float32)}

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        x, weight, bias, added = given.values()
        dtype = torch.float64 if x.dtype == torch.float64 else torch.bfloat16
        normed, stream = layer_norm.layer_norm(impl, x, weight, bias, 1e-5, added, dtype)
        return differentiated({"normed": normed, "stream": stream}, given, douts)

    return Case(f"{shape}: {T} x {D}", inputs, run, terms=max(T, D))


def embedding_case(rows: Rows, shape: str, count: int, vocabulary: int, width: int) -> Case:
    """Ids as in a text: few of them make most of it, and most of the table is not asked for."""
    T, V, D = rows.count(count), vocabulary, width
    inputs = {"table": rows.normal(V, D, dtype=torch.float32, scale=D**-0.5).requires_grad_()}
    share_T = torch.rand(T, generator=rows.generator, device=rows.device)
    ids_T = (share_T**8 * V).long()  # the first tenth of 50,257 rows gets three ids of four
    douts = {"out": rows.normal(T, D, dtype=torch.float32)}

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        out = embedding.IMPLS[impl].embedding(given["table"], ids_T, D**0.5)
        return differentiated({"out": out}, given, douts)

    return Case(f"{shape}: {T} of {V} x {D}", inputs, run, terms=T, definition="aten")


def top_rows_case(rows: Rows, shape: str, batch: int, context: int) -> Case:
    """Half of the rows of each sequence; in bf16 many scores are equal."""
    B, S = batch, rows.count(context)
    inputs = {"score": rows.normal(B, S)}

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        found = top_rows.IMPLS[impl].top_rows(given["score"], S // 2)
        return dict(zip(("rows", "slots", "lowest"), (x.double() for x in found), strict=True))

    return Case(f"{shape}: {S // 2} of {B} x {S}", inputs, run, terms=0)


def rotary_case(rows: Rows, shape: str, batch: int, context: int, heads: int, width: int) -> Case:
    """Queries, keys and values of a joint projection."""
    B, T, H, D = batch, rows.count(context), heads, width
    angles_TD = torch.outer(
        torch.arange(T, dtype=torch.float64), 1e4 ** -(torch.arange(0, D, 2).double() / D)
    )
    inputs = {
        "qkv": rows.normal(B, T, 3, H, D).requires_grad_(),
        "cos": angles_TD.cos().float().to(rows.device),
        "sin": angles_TD.sin().float().to(rows.device),
    }
    douts = {name: rows.normal(B, H, T, D) for name in "qkv"}

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        q, k, v = rotary.rotary(impl, *given.values())
        return differentiated({"q": q, "k": k, "v": v}, given, douts)

    return Case(f"{shape}: {B} x {T} x {H} x {D}", inputs, run, terms=2)


def router_case(rows: Rows, shape: str, count: int, width: int, experts: int) -> Case:
    """Probabilities, the two largest, and the shared expert's gate."""
    T, D, E = rows.count(count), width, experts
    inputs = {
        "x": rows.normal(T, D).requires_grad_(),
        "weight": rows.normal(E, D, dtype=torch.float32, scale=D**-0.5).requires_grad_(),
        "gate": rows.normal(1, D, dtype=torch.float32, scale=D**-0.5).requires_grad_(),
    }
    names = {"probabilities": (T, E), "weights": (T, 2), "gate": (T, 1)}
    douts = {name: rows.normal(*shape, dtype=torch.float32) for name, shape in names.items()}

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        probabilities, weights, _, gate = router.router(impl, *given.values(), 2)
        outputs = {"probabilities": probabilities, "weights": weights, "gate": gate}
        return differentiated(outputs, given, douts)

    return Case(f"{shape}: {T} x {D}, 2 of {E}", inputs, run, terms=max(T, D))


def stream_case(rows: Rows, shape: str, batch: int, context: int, width: int) -> Case:
    """Half of the rows are scattered back, the stream is normed and scored, half are taken."""
    B, S, D = batch, rows.count(context), width
    K = S // 2
    inputs = {
        "x": rows.normal(B, S, D).requires_grad_(),
        "added": rows.normal(B, K, D).requires_grad_(),
        "weight": rows.normal(D, dtype=torch.float32).requires_grad_(),
        "offset": rows.normal(D, dtype=torch.float32).requires_grad_(),
        "router": rows.normal(D, dtype=torch.float32, scale=D**-0.5).requires_grad_(),
    }
    names = {"normed": (B, K, D), "stream": (B, S, D), "score": (B, S)}
    douts = {name: rows.normal(*shape) for name, shape in names.items()}
    before, after = (_selection(rows, B, S, K) for _ in range(2))

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        x, added, weight, offset, router_D = given.values()
        norm = stream_norm.Norm(weight, 1e-6, offset)
        update = stream_norm.Update(added, before)
        scored = stream_norm.add_and_score(impl, x, update, norm, router_D)
        found = stream_norm.take_normed(impl, scored, after, norm, router_D)
        return differentiated(dict(zip(names, found, strict=True)), given, douts)

    return Case(f"{shape}: {B} x {S} x {D}, {K} rows taken", inputs, run, terms=max(B * S, D))


def _selection(rows: Rows, B: int, S: int, K: int) -> stream_norm.RowSelection:
    chosen_BK = torch.stack([rows.order(S)[:K].sort().values for _ in range(B)])
    slots_BS = torch.full((B, S), K, device=rows.device)
    slots_BS.scatter_(1, chosen_BK, torch.arange(K, device=rows.device).expand(B, K))
    return stream_norm.RowSelection(chosen_BK, slots_BS)


def timestep_case(rows: Rows, shape: str, batch: int, context: int, width: int) -> Case:
    """A sequence far from zero."""
    B, L, D, G = batch, rows.count(context), width, 64
    inputs = {
        "x": (rows.normal(B, L, D) + 2).requires_grad_(),
        "weight": rows.normal(D, dtype=torch.float32, scale=0.1).requires_grad_(),
        "bias": rows.normal(D, dtype=torch.float32).requires_grad_(),
    }
    douts = {"out": rows.normal(B, L, D)}

    def run(impl: str, given: dict[str, Tensor]) -> Results:
        x, weight, bias = given.values()
        affine = timestep_norm.Affine(weight, bias, G, 1e-5)
        out, _ = timestep_norm.timestep_norm(impl, x, affine)
        return differentiated({"out": out}, given, douts)

    return Case(f"{shape}: {B} x {L} x {D}, {G} groups", inputs, run, terms=B * L)


# Ops without a benchmark. A case is made when it is its turn: together they would not fit.
CASES: Mapping[str, Sequence[Callable[[Rows], Case]]] = {
    "activation": (
        lambda rows: activation_case(rows, "flagship", 131_072, 3072, "gelu"),
        lambda rows: activation_case(rows, "hydra 100m", 16_384, 2304, "swiglu"),
    ),
    "adamw": (
        lambda rows: adamw_case(rows, "flagship", (8, 3072, 768), rounded=False),
        lambda rows: adamw_case(rows, "flagship", (8, 3072, 768), rounded=True),
        lambda rows: adamw_case(rows, "gpt xl", (6400, 1600), rounded=True),
    ),
    "embedding": (
        lambda rows: embedding_case(rows, "hydra 100m", 16_384, 50_257, 768),
        lambda rows: embedding_case(rows, "gpt xl", 16_384, 10_000, 1600),
    ),
    "feed_forward": (
        lambda rows: feed_forward_case(rows, "flagship", 65_536, 768, 3072, "gelu", weighted=True),
        lambda rows: feed_forward_case(rows, "gpt xl", 16_384, 1600, 6400, "gelu", weighted=False),
        lambda rows: feed_forward_case(
            rows, "hydra 100m", 8192, 768, 2304, "swiglu", weighted=False
        ),
    ),
    "grouped_mm": (
        lambda rows: grouped_case(rows, "flagship", 131_072, 768, 3072),
        lambda rows: grouped_case(rows, "flagship, decoding", 256, 768, 3072, trained=False),
    ),
    "layer_norm": (
        lambda rows: layer_norm_case(rows, "flagship", 65_536, 768),
        lambda rows: layer_norm_case(rows, "gpt xl", 16_384, 1600),
    ),
    "rms_norm": (
        lambda rows: rms_norm_case(rows, "flagship", 65_536, 768),
        lambda rows: rms_norm_case(rows, "gpt xl", 16_384, 1600),
    ),
    "rotary": (
        lambda rows: rotary_case(rows, "flagship", 16, 4096, 12, 64),
        lambda rows: rotary_case(rows, "gpt xl", 16, 1024, 25, 64),
    ),
    "router": (lambda rows: router_case(rows, "flagship", 65_536, 768, 8),),
    "stream_norm": (lambda rows: stream_case(rows, "hydra 100m", 16, 1024, 768),),
    "timestep_norm": (lambda rows: timestep_case(rows, "megalodon 200m", 4, 4096, 1024),),
    "top_rows": (lambda rows: top_rows_case(rows, "hydra 100m", 16, 1024),),
}


def check_covered() -> None:
    """Refuse to run while some op is never asked."""
    asked = {*CASES, *(_bench(name).kernel for name, _, _ in BENCHES)}
    if missing := sorted(set(ops()) - asked):
        raise UserError(f"There is no case for {', '.join(missing)}.", f"Add one to {__file__}.")


def case_rows(op: str, case: Case, device: torch.device) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for every implementation of an op."""
    peer = case.run(case.definition, case.inputs)
    wide = {name: _double(x) for name, x in case.inputs.items()}
    truth = case.run(case.definition, wide)
    for impl in impls(op):
        is_triton = needs_gpu(op, impl) or impl.startswith("triton")
        if device.type == "cpu" and is_triton and not INTERPRETED:
            yield op, case.shape, impl, "", None, None, None, "needs a GPU"
            continue
        try:
            slack = SUM_UNIT * case.terms**0.5
            found = check_accuracy(case.run(impl, case.inputs), peer, truth, slack)
        except Unsupported as error:
            yield op, case.shape, impl, "", None, None, None, first_sentence(error)
            continue
        yield op, case.shape, impl, *verdict(impl, found)


def _double(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_(x.requires_grad)


def bench_rows(
    name: str, shape: str, asked: dict[str, list[Any]], device: str, tiny: bool
) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for every implementation of an op that has a benchmark."""
    bench = _bench(name)
    known = {axis.name for axis in bench.axes}
    small = {axis: values for axis, values in TINY_BENCH.items() if tiny and axis in known}
    every = {"impl": [impl for impl in impls(bench.kernel) if impl != "auto"]}
    template = RunSpec(name, mode="forward+backward", device=device, warmup=1, steps=1)
    for spec in bench.cells({**asked, **small, **every}, template, 0.0):
        run = measure_cell(spec)
        words = f"{shape}: {bench.shape_text(spec.config)}"
        table = run.tables.get(ERRORS)
        if table is None:
            yield bench.kernel, words, spec.config["impl"], "", None, None, None, run.reason
            continue
        found = [Accuracy(*row) for row in table.rows]  # type: ignore[arg-type]
        dropped = next((note for note in run.notes if "dropped" in note), "")
        impl = spec.config["impl"]
        yield bench.kernel, words, impl, *verdict(impl, found, dropped)


def _bench(name: str) -> OpBench:
    bench: OpBench = registry.load("steplab.bench.ops", name, "BENCH")
    return bench


def verdict(impl: str, found: list[Accuracy], dropped: str = "") -> tuple[Cell, ...]:
    """Return the worst result: its name, error, budget, their ratio, and what it means.

    An implementation that drops rows computes something else by design, and says so.
    """
    if impl == FP8:  # not by tiles: small numbers of a row lose more than the large ones
        found = [Accuracy(one.name, one.error, FP8_BUDGET, 0.0) for one in found]
    worst = max(found, key=lambda result: result.of_budget)
    right = "right" if worst.of_budget <= 1 else dropped or WRONG
    return worst.name, worst.error, worst.budget, worst.of_budget, right


def all_rows(asked: list[str], device: str, tiny: bool) -> Iterator[tuple[Cell, ...]]:
    """Yield the rows of the ops asked for, or of all."""
    for name, shape, config in BENCHES:
        if not asked or _bench(name).kernel in asked:
            yield from bench_rows(name, shape, config, device, tiny)
    rows = Rows(find_device(device), TINY if tiny else 1)
    for op in asked or CASES:
        for make in CASES.get(op, ()):
            yield from case_rows(op, make(rows), rows.device)
            if device == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    """Compare and print; the file is written anew after every row. Exit code 1: one is wrong."""
    parser = Parser(prog="kernel_accuracy.py", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these ops")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--tiny", action="store_true", help="a 64th of the tokens")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help=".md, .csv or .json")
    args = parser.parse_args()
    found: list[tuple[Cell, ...]] = []
    known = set(ops())
    try:
        check_suffixes(args.out)
        check_covered()
        for op in args.ops:
            if op not in known:
                raise UserError(f"There is no op called {op!r}.", did_you_mean(op, known))
        conditions = capture_environment().conditions_on(args.device)
        for row in all_rows(args.ops, args.device, args.tiny):
            found.append(row)
            print(*row, sep="  ", file=sys.stderr)
            table = Table("every implementation against fp64", COLUMNS, tuple(found), conditions)
            for path in args.out:
                write_table(table, path)
        print_table(table)
    except SteplabError as error:
        sys.exit(f"kernel_accuracy.py: {error}")
    sys.exit(int(any(row[-1] == WRONG for row in found)))


if __name__ == "__main__":
    main()

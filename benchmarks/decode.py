"""Tokens per second of generation and forecasts.

    PYTHONPATH=src python benchmarks/decode.py [PART ...] [--length N] [--tiny] [--out FILE]

Three ways of the same model with random weights, after a prompt of 64 tokens (contexts of 512
points): `growing`, which attends to the filled part of its cache; `static`, one step over fixed
memory, run op by op; `graph`, the same step replayed. Rates are the middle one of three, without
prompt, warm-up and capture, which `first` has; every token is read on the host, as
`steplab generate` does. `bits` says whether `graph` and `static` chose the same tokens. One that
fails is a row that says why. hydra, gpt and tsmoe took 37 s on an H200.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from steplab.cli.command import Parser
from steplab.core import Column, Table
from steplab.core.errors import SteplabError, UserError, did_you_mean
from steplab.forecasting.decode import Cached, Outputs, decode
from steplab.forecasting.forecaster import Forecaster
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.step.assemble import find_device
from steplab.step.decode_step import graphs_on
from steplab.techniques.recipes import parse_recipe
from steplab.train.generate import Sampling, TokenWriter
from steplab.train.pretrained import ForwardContext, apply_inference_recipe
from steplab.workloads.tsmoe.model import Tsmoe
from steplab.workloads.workload import TokenReader, find_workload

PARTS = {  # workload, size, recipe
    "hydra": ("hydra", "100m", "plain"),
    "gpt": ("gpt", "small", "plain"),
    "tsmoe": ("tsmoe", "small", "plain"),
    "megalodon": ("megalodon", "mega200m", "plain"),
    "hydra-bf16": ("hydra", "100m", "precision=bf16-weights"),
    "gpt-bf16": ("gpt", "small", "precision=bf16-weights"),
    "tsmoe-bf16": ("tsmoe", "small", "precision=bf16-weights"),
}
ROWS = (1, 16)
PROMPT, CONTEXT, HORIZON = 64, 512, 720
REPEATS = 3  # the middle one counts: kernels may be compiled in the first
COLUMNS = (
    Column("part"),
    Column("rows"),
    Column("way"),
    Column("tokens/s"),
    Column("speed-up"),
    Column("ms/token"),
    Column("first", "s"),
    Column("bits"),
    Column("status"),
)
Row = tuple[Any, ...]
SAMPLING = Sampling(0.8, 0, seed=1)


class Growing:
    """Reads tokens one by one as it reads a prompt; its cache grows."""

    def __init__(self, reader: TokenReader) -> None:
        self.reader = reader

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Read tokens."""
        return self.reader(tokens_BT)

    step = __call__


class GrowingFeed(Cached):
    """Feeds points back as it feeds the context."""

    def __call__(self, values_BT: Tensor, documents_BT: Tensor | None) -> Outputs:
        """Return predictions after the new points."""
        self._is_first = True
        return super().__call__(values_BT, documents_BT)


def text(part: str, model: nn.Module, workload: Any, rows: int, length: int) -> Iterator[Row]:
    """Measure a model of text by all ways."""
    device = next(model.parameters()).device
    prompt_BT = torch.randint(256, (rows, PROMPT), generator=torch.Generator().manual_seed(0))

    def write(way: str, count: int) -> tuple[float, float, Tensor, str]:
        start = perf_counter()
        reader = workload.generator(model, rows, PROMPT + length + 3)
        reader = Growing(reader) if way == "growing" else reader
        graphs = graphs_on(device) if way == "graph" else None
        writer = TokenWriter(reader, prompt_BT.to(device), SAMPLING, graphs)
        first = [writer().cpu() for _ in range(3)]  # from the prompt, warm, captured
        began = perf_counter()
        rest = [writer().cpu() for _ in range(count)]
        seconds, tokens_BT = perf_counter() - began, torch.cat(first + rest, 1)
        return began - start, seconds, tokens_BT, writer.step.why_not

    yield from ways(part, rows, write, length, -(-length // 8))


def series(part: str, model: nn.Module, workload: Any, rows: int, length: int) -> Iterator[Row]:
    """Measure a model of series by all ways: forecasts of HORIZON points, tokens are points."""
    assert isinstance(model, Tsmoe)
    device = next(model.parameters()).device
    passes = Forecaster(model).passes(HORIZON)
    generator = torch.Generator().manual_seed(0)
    walks_BT = torch.randn(rows, CONTEXT, generator=generator).cumsum(1)
    values_BT = ((walks_BT - walks_BT.mean(1, True)) / walks_BT.std(1, keepdim=True)).to(device)

    def forecast(way: str, count: int) -> tuple[float, float, Tensor, str]:
        start = perf_counter()
        kind = GrowingFeed if way == "growing" else Cached
        feed = kind(model, graphs_on(device) if way == "graph" else None)
        decode(feed, values_BT, None, passes).points_BH.cpu()
        began = perf_counter()
        for _ in range(count // HORIZON):
            found = decode(feed, values_BT, None, passes).points_BH.cpu()
        why = next((step.why_not for step in feed.steps.values()), "")
        return began - start, perf_counter() - began, found, why

    yield from ways(part, rows, forecast, length // HORIZON * HORIZON, HORIZON)


Measure = Callable[[str, int], tuple[float, float, Tensor, str]]


def ways(part: str, rows: int, measure: Measure, length: int, fewer: int) -> Iterator[Row]:
    """Yield a row for each way; speed-ups are over the first."""
    slowest: float | None = None
    chosen: dict[str, Tensor] = {}
    for way in ("growing", "static", "graph"):
        # The slow ways take as long for every token: fewer will do.
        count = length if way == "graph" else fewer
        try:
            found = [measure(way, count) for _ in range(REPEATS)]
        except Exception as error:
            yield (part, rows, way, *[None] * 5, f"{type(error).__name__}: {error}"[:200])
            continue
        seconds = sorted(one[1] for one in found)[len(found) // 2]
        rate, why = rows * count / seconds, found[0][3]
        slowest = slowest or rate
        chosen[way], same = found[0][2], ""
        if way == "graph" and "static" in chosen:
            known = min(chosen["static"].shape[1], chosen[way].shape[1])
            is_same = torch.equal(chosen["static"][:, :known], chosen[way][:, :known])
            same = "equal" if is_same else "OTHER"
        status = "ok" if way != "graph" or not why else why
        times = (seconds / count * 1e3, found[0][0])
        yield (part, rows, way, rate, rate / slowest, *times, same, status)


def build(part: str, device: torch.device, tiny: bool) -> tuple[Any, nn.Module, ForwardContext]:
    """Return workload, model and forward context of a part."""
    name, size, recipe = PARTS[part]
    entry = find_workload(name)
    longer = {"seq_max_len": 4096} if tiny and name == "tsmoe" else {}
    workload = entry.open(entry.resolve("tiny" if tiny else size, longer))
    torch.manual_seed(0)
    with torch.device(device):
        model = workload.model().eval()
    return workload, model, apply_inference_recipe(parse_recipe(recipe), model, "decoding")


def measured(parts: list[str], device: torch.device, length: int, tiny: bool) -> Iterator[Row]:
    """Yield the rows of all parts."""
    for part in parts:
        try:
            workload, model, forward_context = build(part, device, tiny)
        except Exception as error:
            yield (part, None, "", *[None] * 5, f"{type(error).__name__}: {error}"[:200])
            continue
        kind = series if isinstance(model, Tsmoe) else text
        count = max(length, 4 * HORIZON) if kind is series else length
        for rows in ROWS:
            with torch.inference_mode(), forward_context():
                yield from kind(part, model, workload, rows, count)
        del model


def main() -> int:
    """Measure, show every row at once, print one table; return the exit code."""
    parser = Parser("decode.py", "Tokens per second of generation and forecasts.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--length", type=int, default=400, help="tokens to write")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try it out")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=here, help="cpu or cuda")
    parser.add_argument("--out", type=Path, nargs="*", default=[], help="write the table")
    try:
        args = parser.parse(sys.argv[1:])
        check_suffixes(args.out)
        for part in args.parts:
            if part not in PARTS:
                raise UserError(f"There is no part {part!r}.", did_you_mean(part, PARTS))
        device = find_device(args.device)
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        note = f"torch {torch.__version__}; prompts of {PROMPT} tokens; tsmoe: tokens are points"
        table = Table(f"Decoding, {name}", COLUMNS, (), note)
        start = perf_counter()
        for row in measured(args.parts or list(PARTS), device, args.length, args.tiny):
            print(f"{perf_counter() - start:5.1f} s", row, file=sys.stderr, flush=True)
            table = replace(table, rows=(*table.rows, row))
            for path in args.out:
                write_table(table, path)
        print_table(table)
    except SteplabError as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Predict step time, memory and cost on cards and ranks that are not here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from steplab.cli.command import Command
from steplab.cli.flags import add_out_flag, add_store_flag, local_device
from steplab.cli.step_flags import add_step_flags, add_workload_flags, step_spec
from steplab.core import Column, Recipe, RunSpec, Table, units
from steplab.core.errors import UserError
from steplab.core.prediction import Prediction, work_key
from steplab.core.run import Run
from steplab.core.table import Cell
from steplab.hardware.catalog import Card, find_card
from steplab.hardware.links import find_link, usual_link
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.store.predictions import device_of, prediction_of, predictions, save_prediction
from steplab.techniques.recipes import shared_by

if TYPE_CHECKING:
    from steplab.estimate.cluster import Cluster
    from steplab.estimate.plan import Budget
    from steplab.hardware.catalog import Card

GIB = 2**30
GRAPH = "cuda_graph"
HERE = "here"
COLUMNS = (
    Column("ranks"),
    Column("batch"),
    Column("recipe"),
    Column("step", "ms"),
    Column("80 %", "ms", whole=True),
    Column("tokens/s"),
    Column("MFU"),
    Column("peak", "GiB"),
    Column("fits"),
    Column("sent", "GB", dispensable=2),
    Column("exposed", "ms", dispensable=1),
    Column("days"),
    Column("cost"),
)


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_workload_flags(parser, words, "gpt")
    add_step_flags(parser, ("accumulate", "clip"), batch=4)  # as bench step, which is to confirm it
    add = parser.add_argument
    add("--on", default="h200", metavar="CARD",
        help="the card, as in h200, a100-80gb-sxm, b200; here: measure rank 0 on this machine, in "
        "a group that does nothing")  # fmt: skip
    add("--ranks", type=int, nargs="+", default=[1], metavar="N", help="numbers of GPUs")
    add("--tokens", type=float, default=None, metavar="N", help="tokens to train on, as in 1e11")
    add("--price", type=float, default=None, metavar="X", help="of one GPU for an hour")
    add("--link", default="", metavar="NAME",
        help="between the GPUs of a machine; default: as bench collectives has timed it on such "
        "cards, else what the card usually has")  # fmt: skip
    add("--network", default="ndr", metavar="NAME", help="between machines: ndr, hdr, efa")
    add("--per-machine", type=int, default=8, metavar="N", help="GPUs of a machine")
    add("--plan", action="store_true",
        help="search schemes, experts, batches and checkpointing; the best first")  # fmt: skip
    add("--calibration", action="store_true",
        help="show how good predictions have been so far, by the Runs of the store")  # fmt: skip
    add_store_flag(parser)
    add_out_flag(parser)


def _run(args: argparse.Namespace) -> int:
    store = Store(args.store)
    if args.calibration:
        return _calibration(args, store)
    _check(args)
    # torch takes seconds to import, and bad words are told before.
    from steplab.estimate.kernels import find_named, shipped_times
    from steplab.estimate.measured import measure_rank
    from steplab.estimate.plan import Budget, frontier, search
    from steplab.estimate.predict import StepCounts, largest_batch, predict, unshared

    times = shipped_times()
    here = args.on == HERE
    device = local_device(args.device) if here else "cuda"
    card, name = _here(device, times.card) if here else (named := find_named(args.on), named.name)
    cluster = _cluster(args, store, name, device)
    budget = Budget(args.tokens, args.price)
    spec = step_spec(_alone(args), device)
    if args.plan:
        experts = int(spec.config.get("num_experts", 0))
        found = search(spec, args.ranks, experts, card, times, cluster, _tell)
        tables = [
            _table("plans, the fastest per token first", found, budget, True),
            _table("time against cost", frontier(found, budget), budget, True),
        ]
    else:
        found, most = [], []
        for ranks in args.ranks:
            shared = replace(spec, ranks=ranks, recipe=_recipe(spec.recipe, ranks))
            _tell(f"counting {units.counted(ranks, 'rank')}: {shared.recipe}")
            counts = StepCounts(shared, card, times)
            if here:
                found.append(predict(counts, cluster, measured=measure_rank(shared)))
            else:
                single = _run_of(store, unshared(shared), name) if ranks > 1 else None
                found.append(predict(counts, cluster, single=single))
            most.append(largest_batch(counts) if device == "cuda" else None)
        if not any(p.fits for p in found):
            raise _never_fits(found, most)
        tables = [_table(spec.title, found, budget, False), _memory(found, most)]
        if any(p.sent for p in found):
            tables.append(_sent(found))
    store.check_writable()
    for prediction in found:
        save_prediction(store, prediction)
    for path in args.out:
        for number, table in enumerate(tables):
            suffix = path.suffix if number == 0 else f".{number}{path.suffix}"
            write_table(table, path.with_suffix(suffix))
    for table in tables:
        print_table(table)
    return 0


def _here(device: str, stand_in: Card) -> tuple[Card, str]:
    """Return the card that is here and its name; a CPU's steps are counted as if on `stand_in`."""
    from steplab.probes.environment import capture_environment

    environment = capture_environment()
    if device == "cpu":
        return stand_in, environment.cpu
    card = find_card(environment.device_name)
    if card is None:
        raise UserError(f"{environment.device_name} is not in the catalog of cards.")
    return card, card.name


def _cluster(args: argparse.Namespace, store: Store, name: str, device: str) -> Cluster:
    """Return how devices of that name are connected: as measured, as told, or as usual."""
    from steplab.estimate.cluster import Cluster, measured_links

    seen = {} if args.link else measured_links(_runs(store), name)
    if device == "cpu" and max(args.ranks) > 1 and not (seen or args.link):
        raise UserError(
            f"{store.root} does not know how fast ranks on this {name} talk.",
            "Run steplab bench collectives first, or name a --link.",
        )
    inner = find_link(args.link) if args.link else usual_link(name)
    return Cluster(inner, find_link(args.network), args.per_machine, seen)


def _check(args: argparse.Namespace) -> None:
    if min(args.ranks) < 1 or args.per_machine < 1:
        raise UserError("--ranks and --per-machine must be at least 1.")
    if args.plan and args.on == HERE:
        raise UserError("--plan counts on a card that is named, as in --on h200.")
    for name in ("tokens", "price"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} must be more than 0, not {value}.")
    if args.price is not None and args.tokens is None:
        raise UserError("--price needs --tokens: a cost is of a training.")


def _never_fits(found: Sequence[Prediction], most: Sequence[int | None]) -> UserError:
    """Say by how much a batch is too large, on whatever number of ranks."""
    least = min(found, key=lambda p: p.reserved_bytes)
    return UserError(
        f"{least.spec.title} never fits: a rank on the {least.card} needs "
        f"{least.reserved_bytes / GIB:,.1f} GiB and has {least.card_bytes / GIB:,.1f}.",
        f"The largest batch that fits is {max(batch or 0 for batch in most):,}.",
    )


def _alone(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**{k: v for k, v in vars(args).items() if k != "ranks"})


def _recipe(recipe: Recipe, ranks: int) -> Recipe:
    """Return the recipe that ranks share: without a graph of the step, which cannot communicate."""
    if ranks > 1 and GRAPH in recipe.techniques:
        print(f"{GRAPH} is left out on {ranks} ranks: a graph sends nothing", file=sys.stderr)
        recipe = Recipe({name: how for name, how in recipe.techniques.items() if name != GRAPH})
    return shared_by(recipe, ranks)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _table(title: str, found: Sequence[Prediction], budget: Budget, has_batch: bool) -> Table:
    """Return a row per prediction; `has_batch`: the title does not tell the batch."""
    rows = []
    all_fit = all(p.fits for p in found)
    for p in found:
        hours, cost = budget.hours(p), budget.cost(p)
        cells: tuple[Cell, ...] = (
            p.spec.ranks,
            p.spec.batch if has_batch else None,
            str(p.spec.recipe),
            p.step_ms,
            f"{p.low_ms:.4g} to {p.high_ms:.4g}",
            p.tokens_per_second,
            units.percent(p.mfu),
            p.peak_bytes / GIB,
            None if all_fit else p.fits,
            p.sent_bytes / 1e9,
            p.exposed_ms,
            hours / 24 if hours is not None else None,
            cost,
        )
        rows.append(cells)
    known = found[0].known_by
    note = (
        f"{found[0].card}; memory is {known['memory']}, FLOPs and bytes sent are counted on "
        f"tensors without data\nkernel times are {known['kernels']}\n"
        f"communication is {known['communication']}"
    )
    return Table(f"estimate: {title}", COLUMNS, tuple(rows), note).without_unknown_columns()


def _memory(found: Sequence[Prediction], most: Sequence[int | None]) -> Table:
    """Return what the peak consists of, and the largest batch that fits."""
    kinds = list(found[0].kinds)
    by_size = sorted(kinds, key=lambda kind: -found[0].kinds[kind])
    columns = (
        Column("ranks"),
        Column("peak", "GiB"),
        Column("reserved", "GiB", dispensable=len(kinds) + 1),
        # Where a terminal is narrow, the smallest are left out.
        *(Column(kind, "GiB", 3, dispensable=by_size.index(kind) + 1) for kind in kinds),
        Column("largest batch that fits"),
    )
    rows = [
        (
            p.spec.ranks,
            p.peak_bytes / GIB,
            p.reserved_bytes / GIB,
            *(p.kinds[kind] / GIB for kind in kinds),
            batch,
        )
        for p, batch in zip(found, most, strict=True)
    ]
    title = f"memory of a rank at its peak, {found[0].known_by['memory']}"
    return Table(title, columns, tuple(rows)).without_unknown_columns()


def _sent(found: Sequence[Prediction]) -> Table:
    """Return what a rank sends in a step, by collective, and over which link."""
    columns = (
        *(Column("ranks"), Column("collective"), Column("group"), Column("link")),
        *(Column("calls"), Column("sent", "GB"), Column("if nothing hid it", "ms")),
    )
    rows = tuple(
        (p.spec.ranks, s.op, s.ranks, s.link, s.calls, s.bytes / 1e9, s.ms)
        for p in found
        for s in p.sent
    )
    return Table("what a rank sends in a step: bytes counted, times modelled", columns, rows)


def _run_of(store: Store, spec: RunSpec, card: str) -> Run | None:
    """Return the newest Run of a step on such a card, if it tells how fast card and host are."""
    key = work_key(spec)
    alike = [
        run
        for run in _runs(store)
        if run.status == "ok" and run.clock and run.ran and run.ran.device_busy_ms
        if work_key(run.spec) == key and device_of(run) == card
    ]
    return max(alike, key=lambda run: run.id, default=None)


def _runs(store: Store) -> Iterator[Run]:
    return (run for _, run in store.all() if isinstance(run, Run))


def _calibration(args: argparse.Namespace, store: Store) -> int:
    """Compare all Runs of the store with what was predicted of them."""
    rows = []
    for run in _runs(store):
        if run.status != "ok":
            continue
        prediction = prediction_of(store, run)
        errors = prediction.error(run) if prediction is not None else None
        if prediction is None or errors is None:
            continue
        assert run.clock is not None
        time, memory = errors
        rows.append(
            (
                run.spec.title,
                str(run.spec.recipe),
                prediction.step_ms,
                run.clock.step.median,
                units.percent(time),
                prediction.holds(run),
                units.percent(memory),
            )
        )
    if not rows:
        count = sum(1 for _ in predictions(store))
        raise UserError(
            f"{store.root} has {count} predictions and no Run of any of these steps on its card.",
            "Predict with steplab estimate, then measure with steplab bench step.",
        )
    columns = (
        *(Column("what"), Column("recipe"), Column("predicted", "ms"), Column("measured", "ms")),
        *(Column("error"), Column("in the interval"), Column("memory error")),
    )
    inside = sum(bool(row[5]) for row in rows)
    note = f"{inside} of {len(rows)} inside the 80 % interval"
    table = Table("how good predictions have been", columns, tuple(rows), note)
    for path in args.out:
        write_table(table, path)
    print_table(table)
    return 0


COMMAND = Command(_flags, _run)

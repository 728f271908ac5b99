"""Train a model on series or text, with checkpoints that resume exactly."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steplab.cli.command import Command
from steplab.cli.flags import (
    add_config_flags,
    add_device_flag,
    add_store_flag,
    given_fields,
    local_device,
)
from steplab.cli.step_flags import (
    add_model_flag,
    add_recipe_flag,
    add_workload_flags,
    asked_workload,
    own_model,
)
from steplab.core import PLAIN, Recipe, Run, TrainSettings, TrainSpec, registry
from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.core.input_file import shorten
from steplab.core.spec import BACKENDS
from steplab.parallel.environment import (
    end_with_launcher,
    is_first,
    is_launched,
    launched_size,
    restarts_would_fail,
)
from steplab.store import Store
from steplab.techniques.recipes import alone, check_recipe, shared_by
from steplab.workloads.recorded import note_on_code, workload_of_record
from steplab.workloads.workload import WorkloadEntry, find_workload, is_user_model

if TYPE_CHECKING:
    from steplab.train.loop import TrainResult
    from steplab.train.stop import Stop
    from steplab.train.watch import Watch

DEFAULT_WORKLOAD = "tsmoe"
HANG_TIMEOUT_S = 600.0  # the first step may compile for minutes
LONGEST_WAIT_S = 10**7  # four months
RESTARTS_WOULD_FAIL = (
    "torchrun's restarts over several machines fail, because new ranks ask for the address of dead "
    "ones. Start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine."
)
# Settings that may change when a run is resumed; the others define the run.
RESUMABLE = frozenset(f.name for f in dataclasses.fields(TrainSettings) if f.metadata["resumable"])


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_workload_flags(parser, words, DEFAULT_WORKLOAD)
    add_recipe_flag(parser)
    add_device_flag(parser)
    add = parser.add_argument
    add("--amp", action=argparse.BooleanOptionalAction, default=None,
        help="bf16 autocast; default: on with a GPU")  # fmt: skip
    add("--compile", action="store_true", help="the same as --recipe compile=whole")
    add("--resume", nargs="?", const="newest", default=None, metavar="CHECKPOINT",
        help="continue from a checkpoint, or from the newest in --checkpoint-dir")  # fmt: skip
    add_model_flag(parser, "--resume and --from-checkpoint")
    add_rank_flags(parser, words)
    add_store_flag(parser)
    add_config_flags(parser, "training", TrainSettings, many=False, prefix="train")
    free = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(RESUMABLE))
    parser.epilog = (
        f"A run that is resumed may change --device, the recipe's parallel, {free}; and --ranks "
        "together with --accumulate."
    )


def add_rank_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the flags of a training on several ranks; `words` are what every rank is started with."""
    parser.set_defaults(words=("train", *words))
    add = parser.add_argument_group("ranks").add_argument
    add("--ranks", type=int, default=None, metavar="N",
        help="processes that share every step; under torchrun: as many as it starts")  # fmt: skip
    add("--max-restarts", type=int, default=0, metavar="N",
        help="how often all ranks are started again after one has failed")  # fmt: skip
    add("--backend", choices=BACKENDS, default=None,
        help="how ranks exchange tensors; default: nccl on GPUs, gloo on CPUs")  # fmt: skip
    add("--hang-timeout", type=float, default=HANG_TIMEOUT_S, metavar="SECONDS",
        help="after how long without a step ranks say where they stand, and end")  # fmt: skip


def _run(args: argparse.Namespace) -> int:
    if args.max_restarts < 0:
        raise UserError(f"--max-restarts must not be negative, but is {args.max_restarts}.")
    if not 0 < args.hang_timeout < LONGEST_WAIT_S:
        raise UserError(
            f"--hang-timeout must lie between 0 and {LONGEST_WAIT_S:,} seconds, "
            f"but is {args.hang_timeout}."
        )
    if is_launched():
        return _run_rank(args)
    spec, resume = _plan(args)
    if spec.ranks == 1 and not args.max_restarts:
        return run_training(spec, resume, args.store)
    from steplab.train.launch import launch

    return launch(args.words, spec.ranks, args.max_restarts)


def _run_rank(args: argparse.Namespace) -> int:
    """Be one of the ranks that a launcher has started; rank 0 decides where to begin."""
    end_with_launcher()
    if is_first() and restarts_would_fail():
        _warn(RESTARTS_WOULD_FAIL)
    # torch prints C++ stacks when a connection breaks; the watch says in a sentence who is gone.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import steplab.train.loop  # noqa: F401, before ranks meet: a slow import is no hang
    from steplab.parallel.world import share_text
    from steplab.train.watch import run_as_rank

    def work(watch: Watch) -> int:
        resume = _plan(args)[1] if watch.world.is_first else None
        begin = share_text(str(resume or ""))
        spec = _resumed_spec(args, Path(begin)) if begin else _new_spec(args)
        return run_training(spec, Path(begin) if begin else None, args.store, watch)

    device = local_device(args.device)
    return run_as_rank(work, device, args.backend, args.hang_timeout)


def _plan(args: argparse.Namespace) -> tuple[TrainSpec, Path | None]:
    """Return what to train and the checkpoint to begin with, if any.

    Ranks that are started again by the same command go on with the run that they find.
    """
    from steplab.train.checkpoint import read_progress
    from steplab.train.checkpoint_files import newest_checkpoint

    resume = _resumed(args)
    if resume is not None:
        return _resumed_spec(args, resume), resume
    spec = _new_spec(args)
    folder = Path(spec.settings.checkpoint_dir)
    saves = spec.settings.checkpoint_every and spec.settings.total_steps
    held = newest_checkpoint(folder) if saves else None
    if held is None:
        return spec, None
    saved = read_progress(held).spec
    restarted = is_launched() or spec.ranks > 1 or args.max_restarts
    if restarted and _is_same_run(spec, decode(TrainSpec, dict(saved), f"{held}: spec")):
        return _resumed_spec(args, held), held
    elsewhere = "choose another --checkpoint-dir."
    same = saved["workload"] == spec.workload
    raise UserError(
        f"{folder} holds the checkpoints of another run, of {shorten(saved['workload'])}.",
        f"Go on with it by --resume, or {elsewhere}" if same else elsewhere.capitalize(),
    )


def _is_same_run(one: TrainSpec, other: TrainSpec) -> bool:
    """Whether two specs differ only in what may change when a run is resumed."""

    def fixed(spec: TrainSpec) -> tuple[Any, ...]:
        settings = {k: v for k, v in encode(spec.settings).items() if k not in RESUMABLE}
        settings["accumulate"] = spec.micro_batches
        return spec.workload, encode(spec.config), spec.size, alone(spec.recipe), settings

    return fixed(one) == fixed(other)


def _ranks(args: argparse.Namespace) -> int:
    """Return how many ranks there are or shall be."""
    if not is_launched():
        return 1 if args.ranks is None else int(args.ranks)
    size = launched_size()
    if args.ranks not in (None, size):
        raise UserError(
            f"--ranks {args.ranks} contradicts the launcher, which has started {size}.",
            "Leave --ranks out.",
        )
    return size


def _shared(recipe: Recipe, ranks: int) -> Recipe:
    """Return the recipe with a way to share the step where there are several ranks, checked."""
    recipe = shared_by(recipe, ranks)
    check_recipe(recipe)
    return recipe


def _own_model(args: argparse.Namespace) -> WorkloadEntry | None:
    """Return the user's own model, named by `--model` or as the first word; None: a built-in."""
    first = asked_workload(args)
    return own_model(args.model) or (first if is_user_model(first.name) else None)


def _new_spec(args: argparse.Namespace) -> TrainSpec:
    # Everything is checked before torch is imported, which takes 2 s: typos are reported at once.
    entry = asked_workload(args)
    asked, model_flags = given_fields(args, "train"), given_fields(args)
    settings: TrainSettings = decode(TrainSettings, asked, "flags")
    recipe = _recipe(args)
    if settings.from_checkpoint:
        return _fine_tuning_spec(args, settings, recipe)
    if args.model:
        raise UserError(
            "--model is for --resume and --from-checkpoint.",
            f"Name a new model right after the command: steplab train {args.model}",
        )
    if entry.data is None and settings.total_steps:
        raise _no_data(entry.name)
    entry.resolve(args.size or entry.cpu_preset, model_flags)
    device = local_device(args.device)
    size = args.size or _default_size(entry, device, model_flags)
    suited = {k: v for k, v in entry.training.get(size, {}).items() if k not in asked}
    settings = dataclasses.replace(settings, **suited)
    recipe = _with_default_precision(args, recipe, device)
    config, ranks = entry.resolve(size, model_flags), _ranks(args)
    recipe, backend = _shared(recipe, ranks), args.backend or ""
    return TrainSpec(
        entry.name, config, size, recipe, device, settings, entry.source, ranks, backend
    )


def _no_data(workload: str) -> UserError:
    names = registry.names("steplab.workloads", "WORKLOAD")
    trained = [name for name in names if find_workload(name).data]
    return UserError(
        f"There is no data to train {workload} on; what can be trained: {', '.join(trained)}.",
        "In a loop of your own, steplab.optimize gives it the same step.",
    )


def _default_size(entry: WorkloadEntry, device: str, model_flags: Mapping[str, Any]) -> str:
    """Return the size when none is named; flags of the model change a plain preset."""
    if device == "cpu" and not model_flags and entry.starter:
        return entry.starter
    return entry.default_size(device)


def _fine_tuning_spec(
    args: argparse.Namespace, settings: TrainSettings, recipe: Recipe
) -> TrainSpec:
    """Return the spec of a new run on the model that `--from-checkpoint` names."""
    from steplab.train.pretrained import find_pretrained

    origin = find_pretrained(Path(settings.from_checkpoint), _own_model(args))
    _check_workload(args, origin.path, origin.workload.name)
    _say_note(origin.note)
    if args.size not in ("", origin.size):
        raise origin.conflict("size", args.size, origin.size)
    config = origin.config_with(given_fields(args))
    device = local_device(args.device)
    recipe = _with_default_precision(args, recipe, device)
    settings = dataclasses.replace(settings, from_checkpoint=str(origin.path))
    name, source, ranks = origin.workload.name, origin.workload.source, _ranks(args)
    recipe, backend = _shared(recipe, ranks), args.backend or ""
    return TrainSpec(name, config, origin.size, recipe, device, settings, source, ranks, backend)


def _check_workload(args: argparse.Namespace, path: Path, name: str) -> None:
    """Refuse another built-in workload than that of a checkpoint."""
    if not is_user_model(args.workload) and args.workload not in (DEFAULT_WORKLOAD, name):
        raise UserError(
            f"{path} is a model of {shorten(name)}, not of {args.workload}.",
            f"Leave {args.workload} out: the checkpoint knows what it is.",
        )


def _say_note(note: str) -> None:
    if note:
        say(f"note: {note}")


def _recipe(args: argparse.Namespace) -> Recipe:
    """Return `--recipe` with what `--amp` and `--compile` add to it."""
    techniques = dict(args.recipe.techniques)
    for flag, technique in (("amp", "precision"), ("compile", "compile")):
        if getattr(args, flag) and technique in techniques:
            raise UserError(f"--{flag} and the recipe's {technique} contradict.", "Use one.")
    if args.amp:
        techniques["precision"] = {"dtype": "bf16"}
    if args.compile:
        techniques["compile"] = {"scope": "whole"}
    recipe = Recipe(techniques)
    check_recipe(recipe)
    return recipe


def _with_default_precision(args: argparse.Namespace, recipe: Recipe, device: str) -> Recipe:
    """Add bf16 autocast on a GPU, where neither `--amp` nor the recipe says anything about it."""
    if device == "cpu" or args.amp is not None or "precision" in recipe.techniques:
        return recipe
    recipe = Recipe({**recipe.techniques, "precision": {"dtype": "bf16"}})
    check_recipe(recipe)
    return recipe


def _resumed(args: argparse.Namespace) -> Path | None:
    if args.resume is None:
        return None
    from steplab.train.checkpoint_files import find_checkpoint, newest_checkpoint

    if args.resume != "newest":
        return find_checkpoint(Path(args.resume))
    folder = Path(given_fields(args, "train").get("checkpoint_dir", TrainSettings().checkpoint_dir))
    found = newest_checkpoint(folder)
    if found is None:
        raise UserError(f"There is no checkpoint in {folder}.", "Train first: steplab train")
    return found


def _resumed_spec(args: argparse.Namespace, path: Path) -> TrainSpec:
    """Return the checkpoint's spec with the settings that may change; refuse the others."""
    from steplab.train.checkpoint import read_progress

    saved: TrainSpec = decode(TrainSpec, dict(read_progress(path).spec), f"{path}: spec")
    asked, own = given_fields(args, "train"), _own_model(args)
    _check_workload(args, path, saved.workload)
    workload = workload_of_record(saved.workload, path, own)
    _say_note(note_on_code(workload, saved.workload, saved.source, path))
    for name, value, has in _asked_of_the_run(args, saved):
        if value != has:
            raise _changed(name, has, value)
    for name, value in given_fields(args).items():
        if saved.config.get(name) != value:
            raise _changed(name, saved.config.get(name), value)
    ranks = _ranks(args)
    shared = _shared_out(saved, ranks, asked.pop("accumulate", None))
    for name, value in asked.items():
        if name not in RESUMABLE and getattr(saved.settings, name) != value:
            raise _changed(name, getattr(saved.settings, name), value)
    free = {name: value for name, value in asked.items() if name in RESUMABLE}
    free["accumulate"] = shared
    if "checkpoint_dir" not in free:
        free["checkpoint_dir"] = str(path.parent)
    device = saved.device if args.device == "auto" else local_device(args.device)
    scheme = args.recipe.techniques.get("parallel", saved.recipe.techniques.get("parallel"))
    techniques = dict(alone(saved.recipe).techniques) | ({"parallel": scheme} if scheme else {})
    return dataclasses.replace(
        saved,
        workload=workload.name,
        source=workload.source,
        settings=dataclasses.replace(saved.settings, **free),
        device=device,
        recipe=_shared(Recipe(techniques), ranks),
        ranks=ranks,
        backend=args.backend or "",
    )


def _shared_out(saved: TrainSpec, ranks: int, asked: int | None) -> int:
    """Return the micro-batches of each rank, so that a step has as many as before over all."""
    total = saved.micro_batches
    if total % ranks:
        fitting = [str(n) for n in range(1, total + 1) if total % n == 0]
        raise UserError(
            f"A step of this run has {total} micro-batches of {saved.settings.batch_size}, which "
            f"{ranks} ranks cannot share evenly.",
            f"Resume with --ranks {' or '.join(fitting)}.",
        )
    if asked not in (None, total // ranks):
        raise UserError(
            f"--accumulate {asked} on {ranks} ranks makes {ranks * asked} micro-batches per step, "
            f"but this run has {total}: that would be another run.",
            f"Leave --accumulate out, or use --accumulate {total // ranks}.",
        )
    return total // ranks


def _asked_of_the_run(args: argparse.Namespace, saved: TrainSpec) -> list[tuple[str, str, str]]:
    """Return (flag, asked for, saved) for what was given besides settings and config."""
    found = [("size", args.size, saved.size)] if args.size else []
    if args.recipe != PLAIN or args.amp is not None or args.compile:
        recipe = _with_default_precision(args, _recipe(args), saved.device)
        found.append(("recipe", alone(recipe).label, alone(saved.recipe).label))
    return found


def _changed(name: str, saved: Any, asked: Any) -> UserError:
    flag = name.replace("_", "-")
    return UserError(
        f"--{flag} {asked} differs from the checkpoint's {saved}: that would be another run.",
        f"Leave --{flag} out to resume, or train anew in another --checkpoint-dir.",
    )


def run_training(
    spec: TrainSpec, resume: Path | None, store: Path, watch: Watch | None = None
) -> int:
    """Train, print how it goes, store the Run, and return the exit code. Imports torch.

    `watch` is that of a rank; without one this process trains alone.
    """
    import torch

    from steplab.cli.progress import StepProgress
    from steplab.step.assemble import find_device
    from steplab.train.log import TrainingLog, describe_parameters, peak_memory_line
    from steplab.train.loop import train
    from steplab.train.stop import stop_on_signal

    device = find_device(spec.device)
    precision = str(spec.recipe.techniques.get("precision", {}).get("dtype", "fp32"))
    say(describe_parameters(*_parameters(spec)))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    ranks = f" ranks={spec.ranks}" if spec.ranks > 1 else ""
    say(f"device model={name} precision={precision}{ranks}")
    if not spec.settings.total_steps:
        return 0
    folder = Path(spec.settings.checkpoint_dir) if spec.settings.checkpoint_every else None
    perf, total = spec.settings.log_perf_metrics, spec.settings.total_steps
    with contextlib.ExitStack() as stack:
        stop = watch.stop if watch else stack.enter_context(stop_on_signal())
        beat = watch.beat if watch else lambda step: None
        tell: Callable[[str], None] = lambda line: None  # noqa: E731
        if watch and not watch.world.is_first:
            log = TrainingLog(tell, None, perf, beat)
        else:
            progress = stack.enter_context(StepProgress(total))
            tell = _teller(progress.say, stop)

            def advance(step: int) -> None:
                progress.advance(step)
                beat(step)

            log = TrainingLog(tell, folder, perf, advance)
        outcome = train(spec, log, stop, resume)
        stored = _store_run(Store(store), outcome.run) if outcome.run else []
        ending = [peak_memory_line(device, precision), *stored, *closing_lines(spec, outcome)]
        for line in ending:
            tell(line)
    # As shells report it: 128 and the number of the signal.
    return 128 + signal.Signals[stop.signal] if outcome.stopped else 0


def _store_run(store: Store, run: Run) -> list[str]:
    """Store what was measured; a full disk costs the Run, not the exit code of the training."""
    contention = run.clock.contention if run.clock else ""
    lines = [f"warning: {contention}"] if contention else []
    recompiles = run.compilation.recompiles if run.compilation else ()
    lines += [f"recompiled {one.function}: {one.reason}" for one in recompiles]
    try:
        return [*lines, f"saved {store.save(run)}"]
    except UserError as error:
        return [*lines, f"warning: the Run was not stored: {error}"]


def closing_lines(spec: TrainSpec, outcome: TrainResult) -> list[str]:
    """Say where the run ended and how to continue it."""
    total, folder = spec.settings.total_steps, spec.settings.checkpoint_dir
    where = f" --checkpoint-dir {shlex.quote(folder)}" if folder != "checkpoints" else ""
    where += f" --model {shlex.quote(spec.workload)}" if spec.source else ""
    where += f" --ranks {spec.ranks}" if spec.ranks > 1 else ""
    lines = []
    if outcome.stopped:
        lines.append(f"stopped by a signal at step {outcome.step} of {total}")
    if outcome.saved is None:
        return [*lines, "no checkpoint was written (--checkpoint-every 0)"]
    lines.append(f"checkpoint {outcome.saved}")
    more = "" if outcome.stopped else f" --epochs {spec.settings.epochs + 1}"
    return [*lines, f"next: steplab train --resume{where}{more}"]


def say(line: str) -> None:
    """Print one line at once, also into a file; of several ranks, the first prints."""
    if is_first():
        print(line, flush=True)


def _teller(say: Callable[[str], None], stop: Stop) -> Callable[[str], None]:
    """Return a function that prints; a training must outlive whoever reads what it prints."""
    warned = False

    def tell(line: str) -> None:
        nonlocal warned
        try:
            say(line)
        except BrokenPipeError:  # the reader has gone, for example `head`
            stop.ask("SIGPIPE")
        except OSError as error:  # a full disk below stdout, a terminal that was closed
            if not warned:
                _warn(f"the log is cut off here ({error.strerror}). Training goes on.")
            warned = True

    return tell


def _warn(sentence: str) -> None:
    with contextlib.suppress(OSError):
        print(f"steplab: warning: {sentence}", file=sys.stderr, flush=True)


def _parameters(spec: TrainSpec) -> tuple[int, int]:
    """Return (all, active) parameters; a model without a formula of its own has all active."""
    import torch

    workload = find_workload(spec.workload, spec.source).open(spec.config)
    with torch.device("meta"):
        model = workload.model()
    total = sum(p.numel() for p in model.parameters())
    active = getattr(workload, "active_parameters", None)
    return total, active() if active else total


COMMAND = Command(_flags, _run)

"""A full disk at every call that changes it: one sentence, and nothing that was saved is lost."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from steplab.cli.main import main
from steplab.core import Run, RunSpec
from steplab.core.atomic import append_row
from steplab.core.errors import UserError
from steplab.meter.reading import JsonlSink, write_to_sinks
from steplab.store import Store, open_sweep, pack_runs
from steplab.train.checkpoint_files import list_checkpoints, read_verified_manifest
from steplab.tune.folder import LadderFolder
from steplab.tune.options import TuneOptions
from steplab.tune.progress import NullView
from steplab.tune.search import tune
from tests.machine.failing_disk import FailingDisk, every_failure
from tests.store.test_store import ENVIRONMENT, make_run
from tests.train.tiny_runs import SHAPE
from tests.tune.ladders import ENVIRONMENT as SIMULATED
from tests.tune.ladders import FakeTechnique, NoProcesses, World, use_techniques, use_world

SOURCE = Path(__file__).parents[2] / "src"


def intact(store: Store) -> list[str]:
    """Return the ids of a store in which every Run can be read and no draft is left."""
    assert not list(store.runs.glob(".*"))
    found = dict(store.all())
    assert all(isinstance(run, Run) for run in found.values())
    for run_id, run in found.items():
        files = {path.name for path in (store.runs / run_id).iterdir()}
        assert files == {"run.json", *run.artifacts}
    return list(found)


@pytest.mark.parametrize("stays", [False, True])
def test_saving_a_run(store, stays):
    first = make_run()
    store.save(first)
    run, errors = make_run(), []

    def save():
        nonlocal run
        run = make_run()
        try:
            store.save(run, {"trace.txt": b"abc"})
        except UserError as error:
            errors.append(str(error))

    for disk in every_failure(save, stays=stays):
        ids = intact(store)
        assert first.id in ids
        if run.id not in ids:
            assert errors and "the disk is full" in errors[-1], disk.seen
        else:  # a note that could not be written does not point to another Run
            assert store.resolve("last") == run.id or disk.seen[-1] == "fsync"
    assert errors


def test_beginning_a_sweep(store):
    errors = []

    def begin():
        try:
            open_sweep(store, [RunSpec("gpt")], ENVIRONMENT)
        except UserError as error:
            errors.append(str(error))

    for _ in every_failure(begin):
        assert not list((store.root / "sweeps").glob(".*"))
    assert errors and all("the disk is full" in error for error in errors)


def test_packing(store, tmp_path):
    run, target, errors = make_run(), tmp_path / "pack.zip", []
    store.save(run, {"trace.json": b"{}"})

    def pack():
        target.unlink(missing_ok=True)
        try:
            pack_runs(store, [run.id], target)
        except UserError as error:
            errors.append(str(error))

    for _ in every_failure(pack):
        assert {path.name for path in tmp_path.iterdir()} <= {"store", "pack.zip"}
    assert target.is_file() and errors
    assert all("the disk is full" in error and "--pack" in error for error in errors)


@pytest.mark.slow
def test_a_search_can_be_called_again_after_any_failure(monkeypatch, store):
    """Whatever fails, the ladder on disk is whole, and the same command goes on with it."""
    world = World({"quick": 0.5, "same": 1.0})
    techniques = {name: FakeTechnique({"kind:matmul": 1.0}) for name in world.factors}
    use_techniques(monkeypatch, techniques)
    save = Store.save
    references = use_world(monkeypatch, world, [])
    monkeypatch.setattr(Store, "save", save)  # the simulation's own does nothing
    spec, failures = RunSpec("gpt", {"context": 128, "width": 64}, "tiny"), 0

    def climb():
        return tune(spec, TuneOptions(), store, references, SIMULATED, NullView(), NoProcesses())[0]

    def search():
        nonlocal failures
        shutil.rmtree(store.root, ignore_errors=True)
        try:
            climb()
        except UserError as error:
            failures += "the disk is full" in str(error)

    for disk in every_failure(search):
        runs = intact(store) if store.runs.exists() else []
        paths = store.root.glob("ladders/*/ladder.json")
        ladders = [LadderFolder(path.parent).load() for path in paths]
        for ladder in ladders:  # the champions of this simulation are not stored
            named = {rung.run for rung in ladder.rungs if rung.outcome == "no gain"}
            assert named - {""} <= set(runs), disk.seen
        assert len(ladders) <= 1 and world.alive == 0
        if disk.at % 5 == 1:  # going on from there costs as much as the failure itself
            shutil.rmtree(store.runs, ignore_errors=True)  # simulated Runs have the same ids again
            whole = climb()
            assert whole.finished and whole.winner.label == "quick=true"
            if ladders and not ladders[0].finished:
                assert whole.id == ladders[0].id
    assert failures > 20


TRAIN = [f"--{key.replace('_', '-')}={value}" for key, value in SHAPE.items()] + (
    "--batch-size=4 --steps-per-epoch=2 --log-every=1 --checkpoint-every=1 --validate-every=0 "
    "--validation-batches=0 --keep-last=1"
).split()


@pytest.mark.slow
def test_training(tmp_path, capsys):
    folder, codes = tmp_path / "checkpoints", []

    def train():
        shutil.rmtree(folder, ignore_errors=True)
        codes.append(main(["train", *TRAIN, f"--checkpoint-dir={folder}"]))

    for disk in every_failure(train):
        printed = capsys.readouterr()
        found = [read_verified_manifest(path).progress.step for path in list_checkpoints(folder)]
        assert not list(folder.glob(".draft*"))
        if codes[-1] == 0:  # one checkpoint may be missing, but never the last one
            assert found[-1] == 2, disk.seen
        else:
            assert codes[-1] == 2 and "Cannot write" in printed.err
            assert printed.err.count("\n") == 1
    assert codes[-1] == 0 and 2 in codes


def test_a_row_that_a_full_disk_cut_off_spoils_no_other(tmp_path, monkeypatch):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"loss": 1.0}, {})
    with sink.path.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    sink.write(3, {"loss": 3.0}, {})
    lines = sink.path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in (lines[0], lines[2])] == [1, 3]
    assert lines[1] == '{"step": 2, "lo' and len(lines) == 3


def test_a_row_that_does_not_fit_is_an_error_and_not_half_a_row(tmp_path):
    import resource

    path, limit = tmp_path / "rows.csv", resource.getrlimit(resource.RLIMIT_FSIZE)
    append_row(path, "a" * 90)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError):
            append_row(path, "b" * 90)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    append_row(path, "c")
    assert path.read_text().splitlines()[-1] == "c"


def test_a_sink_that_fails_is_a_warning(tmp_path, monkeypatch):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    FailingDisk(1).install(monkeypatch)
    assert "No space left" in write_to_sinks([sink], 1, {"loss": 1.0}, {})[0]


def test_output_on_a_full_disk_is_one_sentence(tmp_path):
    """/dev/full takes nothing; Python would notice only at exit, with a traceback."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    command = [sys.executable, "-m", "steplab", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment)
    assert done.returncode == 1
    assert done.stderr.decode() == "steplab: the system refused: No space left on device.\n"


# --- a real file system of a few hundred kB

MOUNT = ["unshare", "--map-root-user", "--mount", "--kill-child"]
INSIDE = 'mount -t tmpfs -o size="$1"k tmpfs "$2" && cd "$2" && shift 2 && exec "$@"'


def on_small_disk(kilobytes: int, folder: Path, words: str) -> subprocess.CompletedProcess:
    """Run a command of steplab in a file system of its own, mounted at `folder`."""
    command = [*MOUNT, "sh", "-c", INSIDE, "sh", str(kilobytes), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command += [sys.executable, "-m", "steplab", *words.split()]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.slow
def test_a_log_on_a_full_disk_does_not_end_a_training(mountable, tmp_path):
    inside = INSIDE.replace('exec "$@"', 'exec "$@" > log')
    words = ["train", *TRAIN, "--steps-per-epoch=60", f"--checkpoint-dir={tmp_path / 'saved'}"]
    command = [*MOUNT, "sh", "-c", inside, "sh", "4", str(mountable)]
    command += [sys.executable, "-m", "steplab", *words]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    said = "steplab: warning: the log is cut off here (No space left on device)."
    assert done.returncode == 0 and done.stderr == f"{said} Training goes on.\n"
    assert [path.name for path in list_checkpoints(tmp_path / "saved")] == ["step-00000060"]


@pytest.fixture
def mountable(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        tried = subprocess.run([*MOUNT, "mount", "-t", "tmpfs", "tmpfs", str(folder)])
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if tried.returncode:
        pytest.skip("this system does not let us mount a file system")
    return folder


TINY = "gpt --size tiny --width 32 --ff-width 64 --layers 1 --heads 2 --context 16 --vocab-size 64"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kilobytes", "words", "flag"),
    [
        (100, "train " + " ".join(TRAIN), "--checkpoint-dir"),
        (4, f"bench step {TINY} --batch 2 --steps 2 --mode infer", "--store"),
        (200, f"profile {TINY} --batch 2", "--store"),
        (60, f"tune {TINY} --batch 2 --budget 0.2", "--store"),
    ],
)
def test_commands_on_a_small_disk(mountable, kilobytes, words, flag):
    done = on_small_disk(kilobytes, mountable, words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "the disk is full" in last and flag in last

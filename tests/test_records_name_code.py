"""Records that name code: no command imports what a checkpoint, a Run, a pack or a ladder names.

Every record here says that it was made with a file that leaves a sentinel when it is imported. The
file lies where a stranger could have put it: inside the record, beside it, in the folder of work.
"""

import io
import json
import shutil
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from steplab.bench.sweep import sweep
from steplab.cli.command import Group
from steplab.cli.main import main
from steplab.core import Environment, Run, RunSpec
from steplab.core.errors import UserError
from steplab.core.run import new_run
from steplab.forecasting.forecaster import Forecaster
from steplab.lint.lint import lint
from steplab.profiling.plan import ProfilePlan
from steplab.profiling.recorder import profile_spec
from steplab.step.assemble import assemble
from steplab.step.live import LiveStep
from steplab.step.trial import trial
from steplab.store import Store, open_sweep, pack_runs
from steplab.train.checkpoint_files import (
    CHECKPOINT_FILE,
    manifest_from_json,
    manifest_to_json,
    newest_checkpoint,
)
from steplab.train.loop import Stop, Trainer
from steplab.tune.folder import GATE_FILE, LADDER_FILE
from steplab.verify.references import dry_run, has_dropout, make_references
from steplab.verify.shapes import GateShape, shapes_to_try
from steplab.workers.client import Worker
from steplab.workers.program import Program
from steplab.workloads.user_model import load_user_model
from steplab.workloads.workload import find_workload
from tests.compare.sides import ENVIRONMENT, run_of
from tests.train.tiny_runs import make_spec, silent

# Ways to name evil.py from the folder that holds it, and other code.
NAMES = (
    "evil.py:make",
    "script:evil.py",
    "./evil.py:make",
    "checkpoints/step-00000002/evil.py:make",
    "store/runs/20250101-aaa/evil.py:make",
    "checkpoints/../evil.py:make",
    "{here}/evil.py:make",
    "evil:make",
    "evil.py",
    "package.evil:make",
    "steplab.workloads.gpt.workload:GPTWorkload",
)
HASH = "0123456789ab"
STORED = "--store store"
TINY_GPT = "gpt --size tiny --context 16 --layers 1 --width 32 --batch 2 --device cpu"
TINY_OP = "--impl reference --dtype fp32 --repeats 2 --warmup 1 --device cpu"
SWEEPS = "goes on with a sweep, as bench step does"
WORDS = "measures what its words name and reads no record"
DATA = "series are data"
# Command lines of every command that opens a record, or why there is none.
COMMANDS: dict[str, list[str] | str] = {
    "forecast": ["series.npy --horizon 2 --checkpoint checkpoints", "series.npy --horizon 2"],
    "evaluate": ["--checkpoint checkpoints --windows 1 --horizon 2"],
    "generate": ["--checkpoint checkpoints --length 2"],
    "export": ["checkpoints --out exported"],
    "train": [
        "--resume",
        "--resume checkpoints/step-00000002 --epochs 2",
        "gpt --resume",
        "--from-checkpoint checkpoints --checkpoint-dir new --steps-per-epoch 1",
        "--steps-per-epoch 1",  # into a folder that holds another run
    ],
    "compare": [f"aaa bbb {STORED}", f"aaa bbb --rerun 2 {STORED}", f"aaa aaa --rerun 2 {STORED}"],
    "estimate": [f"--calibration {STORED}"],
    "explain": [f"aaa {STORED}", f"aaa {STORED} --page page.html"],
    "report": [f"{STORED} --out page.html"],
    "runs": [
        STORED,
        f"aaa --json {STORED}",
        f"{STORED} --out table.csv",
        f"{STORED} --workload evil.py:make",
        f"{STORED} --pack again.zip",
        "--store other --unpack runs.zip",
        "--store other --unpack with_code.zip",
        f"aaa --delete {STORED}",
    ],
    "bench step": [f"{TINY_GPT} --mode forward --steps 1 --warmup 0 {STORED}"],
    "bench attention": [f"--batch 1 --heads 2 --context 16 --head-width 8 {TINY_OP} {STORED}"],
    "bench experts": SWEEPS,
    "bench loss": SWEEPS,
    "bench ema": SWEEPS,
    "bench infer": SWEEPS,
    "bench collectives": SWEEPS,
    "bench compile": WORDS,
    "bench convergence": "goes on with losses, which name nothing",
    "bench ddp": SWEEPS,
    "tune": "test_a_ladder_that_names_code_is_not_continued",
    "bench precision": WORDS,
    "profile": WORDS,
    "lint": WORDS,
    "env": "opens nothing",
    "data clean": DATA,
    "data download": DATA,
    "data info": DATA,
    "data pack": DATA,
}
NEED_THE_MODEL = ("forecast", "evaluate", "generate", "train")


def commands(group: Group, before: str = "") -> Iterator[str]:
    """Yield the words of every command."""
    for name in group.names():
        command = group.load(name)
        if isinstance(command, Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def test_every_command_is_tried_or_excused():
    assert sorted(commands(Group("steplab.cli"))) == sorted(COMMANDS)


def plant(path: Path, sentinel: Path) -> None:
    """Write a model that leaves a sentinel behind when it is imported."""
    path.write_text(
        "from pathlib import Path\n"
        f"Path({str(sentinel)!r}).write_text(__file__)\n"
        "def make(width: int = 8):\n"
        "    pass\n"
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Work in a folder with evil.py, and see afterwards that nobody has imported it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "package").mkdir()
    sentinel = tmp_path / "sentinel"
    for name in ("evil.py", "package/__init__.py", "package/evil.py"):
        plant(tmp_path / name, sentinel)
    yield tmp_path
    assert not sentinel.exists(), f"{sentinel.read_text()} was imported"
    assert not {"evil", "package"} & set(sys.modules)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with one checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "checkpoints"
    Trainer(make_spec(folder, steps_per_epoch=2, checkpoint_every=2), silent()).run(Stop())
    return folder


def reseal(checkpoint: Path, **spec) -> None:
    """Change the spec in a checkpoint; its checksum fits again."""
    file = checkpoint / CHECKPOINT_FILE
    manifest = manifest_from_json(file.read_bytes(), str(file))
    progress = replace(manifest.progress, spec={**manifest.progress.spec, **spec})
    file.write_bytes(manifest_to_json(replace(manifest, progress=progress)))


@pytest.fixture
def hostile(here, trained):
    """Fill the folder with records that name a piece of code, and with the code."""

    def fill(name: str) -> str:
        name = name.format(here=here)
        np.save(here / "series.npy", np.sin(np.arange(200.0)))
        shutil.copytree(trained, here / "checkpoints")
        checkpoint = newest_checkpoint(here / "checkpoints")
        reseal(checkpoint, workload=name, source=HASH)
        store = Store(here / "store")
        for run_id in ("20250101-aaa", "20250101-bbb"):
            store.save(replace(run_of(workload=name, source=HASH), id=run_id))
        pack_runs(store, store.ids(), here / "runs.zip")
        shutil.copy(here / "runs.zip", here / "with_code.zip")
        with zipfile.ZipFile(here / "with_code.zip", "a") as archive:
            archive.write(here / "evil.py", "20250101-aaa/evil.py")
        for folder in (checkpoint, store.runs / "20250101-aaa", store.root):
            plant(folder / "evil.py", here / "sentinel")
        return name

    return fill


@pytest.fixture
def no_processes(monkeypatch):
    """Let workers answer inside this process: starting one takes seconds."""

    def start(worker):
        worker.replies = io.StringIO()
        worker.program = Program(worker.replies)

    def write(worker, request):
        worker.program.answer(json.loads(json.dumps(request)))

    def next_message(worker, deadline, timeout):
        line, _, rest = worker.replies.getvalue().partition("\n")
        worker.replies.seek(0)
        worker.replies.truncate()
        worker.replies.write(rest)
        return json.loads(line)

    monkeypatch.setattr(Worker, "__init__", start)
    monkeypatch.setattr(Worker, "_write", write)
    monkeypatch.setattr(Worker, "_next_message", next_message)
    monkeypatch.setattr(Worker, "close", lambda worker: None)
    monkeypatch.setattr(Worker, "is_alive", True)


# A sweep does not depend on how code is named, and takes longer.
ATTEMPTS = [
    (f"{command} {words}", name)
    for command, lines in COMMANDS.items()
    if isinstance(lines, list)
    for words in lines
    for name in (NAMES if not command.startswith("bench") else NAMES[:1])
]


@pytest.mark.parametrize(("command", "name"), ATTEMPTS)
def test_no_command_imports_what_a_record_names(command, name, hostile, no_processes, capsys):
    name = hostile(name)
    code = main(command.split())
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if command.startswith(NEED_THE_MODEL) or "--rerun" in command:
        assert code == 2 and said.count("\n") == 1, said
    if code == 2:
        assert said.count("\n") == 1, said
    if command.startswith(("forecast", "evaluate", "generate", "train --resume")):
        assert "--model my_model.py:make" in said and name in said


def test_a_ladder_that_names_code_is_not_continued(here, no_processes, monkeypatch, capsys):
    """ladder.json and gate.json belong to the step that the words name, or are refused."""

    def stop(shape: GateShape, dtype: str, folder: Path) -> str:
        raise UserError("The references are not computed here.")

    monkeypatch.setattr("steplab.verify.references.make_references", stop)
    words = f"tune {TINY_GPT} {STORED}".split()
    assert main(words) == 2 and "not computed here" in capsys.readouterr().err
    (folder,) = (here / "store" / "ladders").iterdir()
    ladder = json.loads((folder / LADDER_FILE).read_text())
    for name in NAMES:
        code = {"workload": name.format(here=here), "source": HASH}
        plant(folder / "evil.py", here / "sentinel")
        shape = {"name": "own", "words": "", "spec": {**ladder["spec"], **code}}
        (folder / GATE_FILE).write_text(json.dumps([shape]))
        assert main(words) == 2
        assert "gate.json belongs to another step" in capsys.readouterr().err
        (folder / GATE_FILE).unlink()
        hostile = {**ladder, "spec": {**ladder["spec"], **code}}
        (folder / LADDER_FILE).write_text(json.dumps(hostile))
        assert main(words) == 2
        assert "ladder.json belongs to another step" in capsys.readouterr().err
        (folder / LADDER_FILE).write_text(json.dumps(ladder))


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_with_runs_that_name_code_is_continued_without_them(name, here, tiny_spec):
    store, spec = Store(here / "store"), tiny_spec()
    begun = open_sweep(store, [spec, replace(spec, batch=3)], ENVIRONMENT)
    evil = RunSpec(name.format(here=here), source=HASH)
    store.save(replace(new_run(evil, ENVIRONMENT), group=begun.id))

    class Trials:
        """Measures nothing."""

        def trial(self, spec: RunSpec, environment: Environment, key: str, progress) -> Run:
            return new_run(spec, environment)

    specs = [spec, replace(spec, batch=3)]
    runs = sweep(specs, store, Trials(), ENVIRONMENT, [], lambda *said: None, lambda said: None)
    assert [run.spec for run in runs] == specs


@pytest.mark.parametrize("name", ["evil.py:make", "{here}/evil.py:make", "package.evil:make"])
def test_no_function_imports_what_a_spec_names(name, here, trained):
    """What workers call, and what Python users call."""
    spec = RunSpec(name.format(here=here), {"width": 8}, source=HASH)
    shape = GateShape("own", "", spec)
    plan = ProfilePlan((0, 1, 1, 1), False)
    own = make_spec(here / "new")
    attempts = [
        lambda: find_workload(spec.workload),
        lambda: assemble(spec),
        lambda: trial(spec),
        lambda: lint(spec, 2),
        lambda: LiveStep(spec, lambda text: None),
        lambda: profile_spec(spec, plan, here, lambda text: None),
        lambda: shapes_to_try(spec),
        lambda: make_references(shape, "fp64", here / "references"),
        lambda: has_dropout(spec),
        lambda: dry_run(spec, shape),
        lambda: Trainer(replace(own, workload=spec.workload), silent()),
    ]
    for attempt in attempts:
        with pytest.raises(UserError, match=r"nobody has named its file here.*--model"):
            attempt()
    shutil.copytree(trained, here / "checkpoints")
    reseal(newest_checkpoint(here / "checkpoints"), workload=spec.workload)
    with pytest.raises(UserError, match="was made with"):
        Forecaster.load(here / "checkpoints")


def test_a_worker_imports_what_its_parent_named_and_nothing_else(here):
    """In a process of its own, with everything that a stranger could put into its way."""
    good = here / "good.py"
    good.write_text(
        "import torch, steplab\n"
        "def make(width: int = 8):\n"
        "    def batches(size):\n"
        "        while True: yield torch.ones(size, width)\n"
        "    model = torch.nn.Linear(width, 1)\n"
        "    return steplab.UserModel(model, batches, lambda model, x: model(x).mean())\n"
    )
    entry = load_user_model("good.py:make")
    small = {"batch": 2, "steps": 1, "warmup": 0}
    mine = RunSpec(entry.name, entry.resolve("", {}), source=entry.source, **small)
    with Worker() as worker:
        for name in NAMES:
            evil = replace(mine, workload=name.format(here=here))
            with pytest.raises(UserError, match="nobody has named its file here"):
                worker.call("steplab.step.trial:trial", Run, timeout=120, spec=evil)
        run = worker.call("steplab.step.trial:trial", Run, timeout=120, spec=mine)
        assert run.status == "ok", run.reason
        good.write_text(good.read_text() + "# changed\n")
        with pytest.raises(UserError, match=r"good.py:make has changed: the hash of its file was"):
            worker.call("steplab.step.trial:trial", Run, timeout=120, spec=mine)

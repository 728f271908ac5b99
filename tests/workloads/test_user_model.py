import hashlib
import importlib.util
import os
import py_compile
import sys
from pathlib import Path

import pytest
import torch

from steplab.compare.step_tables import step_table
from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.step.assemble import assemble
from steplab.step.trial import trial
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.user_model import load_user_model
from steplab.workloads.workload import find_workload, requested_workload

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"
GOOD = """
import torch
import steplab
def make(width: int = 8):
    \"\"\"A line.\"\"\"
    def batches(size):
        while True:
            yield {"x": torch.ones(size, width)}
    loss = lambda model, batch: model(batch["x"]).mean()
    return steplab.UserModel(torch.nn.Linear(width, 3, bias=False), batches, loss, 5)
"""


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    return write


def test_the_example_is_measured():
    name = f"{EXAMPLE}:recurrent"
    entry = requested_workload(name)
    config = entry.resolve("", {"width": 8, "context": 12})
    run = trial(RunSpec(name, config, batch=2, steps=2, warmup=1))
    assert run.status == "ok", run.reason
    assert run.work.tokens == 2 * 12 and run.work.covered_calls > 0


def test_counted_flops_are_exact(file):
    """A (4, 8) by (8, 3) product: 192 FLOPs forward; its backward needs the weight's only."""
    name = f"{file(GOOD)}:make"
    run = trial(RunSpec(name, requested_workload(name).resolve("", {}), batch=4, steps=1, warmup=0))
    assert run.work.model == 3 * 2 * 4 * 8 * 3
    assert run.work.hardware == 2 * 2 * 4 * 8 * 3
    assert run.work.tokens == 20


@pytest.mark.parametrize(
    ("tail", "unit"), [("5)", "tokens"), (")", "samples"), ('5, unit="images")', "images")]
)
def test_what_is_counted_has_its_name(file, tail, unit):
    name = f"{file(GOOD.replace('5)', tail))}:make"
    run = trial(RunSpec(name, requested_workload(name).resolve("", {}), batch=4, steps=1, warmup=0))
    assert run.work.unit == unit
    assert f"{unit}/s" in [column.name for column in step_table([run]).columns]


def test_parameters_become_config(file):
    entry = requested_workload(f"{file(GOOD)}:make")
    assert entry.resolve("", {"width": 16}) == {"width": 16}
    assert entry.summary == "A line."


@pytest.mark.parametrize(
    ("text", "factory", "words"),
    [
        ("def make(:\n", "make", "does not import: SyntaxError"),
        ("import no_such_module_here\n", "make", "does not import: ModuleNotFoundError"),
        ("from .nets import Net\n", "make", r"relative import.* Write from nets import Net"),
        (GOOD, "mkae", "Did you mean 'make'"),
        ("def make(width):\n    pass\n", "make", "needs a default"),
        ("def make(layers=[1]):\n    pass\n", "make", "needs a default"),
        ("def make(**sizes):\n    pass\n", "make", r"takes \*\*sizes.* Name each parameter"),
        ("class Net:\n    pass\n", "Net", r"is a class, .* steplab\.UserModel\(model=Net"),
    ],
)
def test_files_that_cannot_be_used(file, text, factory, words):
    with pytest.raises(UserError, match=words):
        requested_workload(f"{file(text)}:{factory}")


def test_a_factory_may_import_its_neighbors_as_late_as_it_likes(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "late_net.py").write_text("import torch\nNet = torch.nn.Linear\n")
    (tmp_path / "late_loss.py").write_text("def mean(x):\n    return x.mean()\n")
    text = GOOD.replace("    def batches", "    from late_net import Net\n    def batches")
    text = text.replace("torch.nn.Linear", "Net")
    text = text.replace(
        'loss = lambda model, batch: model(batch["x"]).mean()',
        "def loss(model, batch):\n        import late_loss\n"
        '        return late_loss.mean(model(batch["x"]))',
    )
    (tmp_path / "late.py").write_text(text)
    name = f"{tmp_path / 'late.py'}:make"
    run = trial(RunSpec(name, requested_workload(name).resolve("", {}), batch=4, steps=1))
    assert run.status == "ok", run.reason


def test_a_module_of_a_package_is_named_as_python_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "ownpackage" / "models"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from .net import make\n")
    (package / "shapes.py").write_text("WIDTH = 6\n")
    (package / "net.py").write_text(
        GOOD.replace("import steplab", "import steplab\nfrom .shapes import WIDTH").replace(
            "width: int = 8", "width: int = WIDTH"
        )
    )
    for name in ("ownpackage.models.net:make", "ownpackage.models:make"):
        entry = requested_workload(name)
        assert entry.resolve("", {}) == {"width": 6}
        run = trial(RunSpec(name, {"width": 6}, batch=4, steps=1))
        assert run.status == "ok", run.reason
    with pytest.raises(UserError, match=r"no module ownpackage\.missing.* Give its file"):
        requested_workload("ownpackage.missing:make")


@pytest.mark.parametrize("name", ["nowhere.py:make", "mine.py", ":make", "mine.py:"])
def test_names_that_are_none(name):
    with pytest.raises(UserError):
        requested_workload(name)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (".mean()", "", r"scalar.*\(4, 3\)"),
        ("return steplab.UserModel(", "return (", "return steplab.UserModel"),
    ],
)
def test_workloads_that_cannot_be_stepped(file, old, new, words):
    name = f"{file(GOOD.replace(old, new))}:make"
    with pytest.raises(UserError, match=words):
        trial(RunSpec(name, requested_workload(name).resolve("", {}), batch=4))


def test_what_is_no_regular_file_is_said_to_be_what_it_is(tmp_path):
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    for kind in ("folder", "pipe"):
        with pytest.raises(UserError, match=f"is a {kind}"):
            load_user_model(f"{tmp_path}/{kind}.py:make")
    with pytest.raises(UserError, match="no file"):
        load_user_model(f"{tmp_path}/missing.py:make")


def test_batches_that_end_are_started_again(file):
    name = f"{file(GOOD.replace('while True:', 'for _ in range(2):'))}:make"
    run = trial(RunSpec(name, requested_workload(name).resolve("", {}), batch=4, steps=5))
    assert run.status == "ok" and len(run.clock.step.values) == 5


def test_an_exception_in_the_model_is_a_failed_run(file):
    text = GOOD.replace('model(batch["x"])', 'model(batch["y"])')
    name = f"{file(text)}:make"
    run = trial(RunSpec(name, requested_workload(name).resolve("", {})))
    assert run.status == "failed" and "KeyError: 'y'" in run.reason and "mine.py" in run.reason


MODULE = """
class Net(torch.nn.Linear):
    turn = 0
    def forward(self, x):
        {line}
        return super().forward(x)
def make("""


COUNTS = "self.turn += 1; x = x * self.turn"
# What is compiled again and again is not generated again and again.
EAGER_GRAPHS = "compile=whole,compile.backend=aot_eager"
AGAIN = "compiled again too often, each time for self.turn"


@pytest.mark.parametrize(
    ("line", "limit", "said"),
    [
        ("print()", 8, "Unsupported"),
        (COUNTS, 8, f"FailOnRecompileLimitHit: forward was {AGAIN}"),
        (COUNTS, 64, f"Still compiling after 12 steps: forward was {AGAIN}"),
    ],
)
def test_what_the_compiler_refuses_has_its_line(file, line, limit, said):
    """Not that of the loss, which only calls the model."""
    text = GOOD.replace("def make(", MODULE.format(line=line)).replace("torch.nn.Linear(w", "Net(w")
    name = f"{file(text)}:make"
    config, recipe = requested_workload(name).resolve("", {}), parse_recipe(EAGER_GRAPHS)
    with torch._dynamo.config.patch(recompile_limit=limit):
        run = trial(RunSpec(name, config, recipe=recipe, steps=9))
    assert run.status == "failed" and said in run.reason and "mine.py:8 (forward)" in run.reason


def test_an_error_without_a_line_of_the_user_is_not_placed_in_steplab(file):
    """A loader of samples that cannot be stacked: the error is torch's own."""
    loader = "lambda size: torch.utils.data.DataLoader([None] * 9, size)"
    name = f"{file(GOOD.replace('batches, loss', f'{loader}, loss'))}:make"
    run = trial(RunSpec(name, requested_workload(name).resolve("", {})))
    assert run.status == "failed" and "(collate.py:" in run.reason


def test_batches_reach_the_device(file):
    name = f"{file(GOOD)}:make"
    workload = requested_workload(name).open({"width": 8})
    workload.model()
    batch = next(workload.batches(2, torch.device("meta"), 0))
    assert batch["x"].device.type == "meta"


def test_a_file_that_ends_the_program_is_reported(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(UserError, match="does not import: SystemExit: 3"):
        requested_workload(f"{path}:make")


def test_what_runs_is_what_is_hashed(file):
    """A __pycache__ beside the file, with its size and time, is not taken for it."""
    path = file(GOOD)
    other = path.with_name("other.py")
    other.write_text(GOOD.replace("A line.", "A lie.."))
    assert other.stat().st_size == path.stat().st_size
    os.utime(other, (path.stat().st_mtime,) * 2)
    py_compile.compile(str(other), cfile=importlib.util.cache_from_source(str(path)))
    entry = load_user_model(f"{path}:make")
    assert entry.summary == "A line."
    assert entry.source == hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def test_a_model_is_found_by_its_name_once_the_user_has_named_it(file, monkeypatch, tmp_path):
    """From any folder then: the file is the one that the user meant."""
    file(GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="nobody has named its file here"):
        find_workload("mine.py:make")
    entry = load_user_model("mine.py:make")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_workload("mine.py:make", entry.source).source == entry.source
    file(GOOD + "# changed")
    with pytest.raises(UserError, match=f"has changed: the hash of its file was {entry.source}"):
        find_workload("mine.py:make", entry.source)


def test_a_file_that_does_not_import_is_not_remembered(file):
    path = file("raise ValueError")
    with pytest.raises(UserError, match="does not import"):
        load_user_model(f"{path}:make")
    with pytest.raises(UserError, match="nobody has named its file here"):
        find_workload(f"{path}:make")


AWKWARD = EXAMPLE.parent / "several_optimizers.py"


def test_several_optimizers_are_stepped_as_one():
    step = assemble_example(f"{AWKWARD}:two_optimizers", {"width": 4, "layers": 1})
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    x = torch.randn(3, 4)
    loss = torch.nn.functional.mse_loss(step.model(x), x)
    grads = dict(zip(before, torch.autograd.grad(loss, step.model.parameters()), strict=True))
    step([x])
    after = dict(step.model.named_parameters())
    torch.testing.assert_close(after["0.weight"], before["0.weight"] - 0.01 * grads["0.weight"])
    moved = before["0.bias"] * (1 - 1e-3 * 0.01) - 1e-3 * grads["0.bias"].sign()  # first AdamW step
    torch.testing.assert_close(after["0.bias"], moved, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("part", ["generator", "discriminator"])
def test_each_half_of_a_gan_trains_its_own_part(part):
    step = assemble_example(f"{AWKWARD}:gan", {"part": part, "width": 4})
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    step([next(step.workload.batches(3, torch.device("cpu"), 0))])
    for name, p in step.model.named_parameters():
        assert torch.equal(p, before[name]) == (not name.startswith(part)), name


def assemble_example(name, config):
    entry = requested_workload(name)
    return assemble(RunSpec(name, entry.resolve("", config), batch=3, clip=0.0))

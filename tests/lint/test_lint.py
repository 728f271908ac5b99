"""Planted hazards are found at their lines, and clean models have none."""

import pytest
import torch

from steplab.cli.main import main
from steplab.core import RunSpec
from steplab.core.errors import MeasurementError, UserError
from steplab.lint.hazards import BRANCH, BREAK, RECOMPILES, VARIES, WAIT, Hazard, hazard_table
from steplab.lint.lint import ONE_GRAPH, SIZE, _break_hazard, graph_breaks, lint
from steplab.probes.compilation import GraphBreak
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload, requested_workload
from tests.own_models import named

FILE = """
import torch, steplab
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.seen = 0

    def forward(self, x):
        x = self.first(x)
        {line}
        return self.second(x).square().mean()

def make(rows: int = 0):
    def batches(size):
        step = 0
        while True:
            step += 1
            yield torch.randn(size + (step % 3 if rows else 0), 6)
    return steplab.UserModel(Net(), batches, lambda m, x: m(x))
"""
LINE = 13


def hazards(tmp_path, line="pass", **config):
    path = tmp_path / "own.py"
    path.write_text(FILE.format(line=line))
    entry = requested_workload(f"{path}:make")
    return lint(RunSpec(named(f"{path}:make"), entry.resolve("", config), batch=8), steps=3)


def kinds_at_the_line(found):
    return {h.kind for h in found if f"own.py:{LINE} (forward)" in h.line}


@pytest.mark.parametrize(
    ("line", "op", "kinds"),
    [
        ("self.seen = x.max().item()", ".item()", {WAIT, BREAK}),
        ("self.seen = float(x.detach().max())", "float(tensor)", {WAIT, BREAK}),
        ("x = x * x[0].tolist()[0]", ".tolist()", {WAIT, BREAK}),
        ("x = x * float(x.detach().cpu().numpy()[0, 0])", ".cpu()", {WAIT}),
        ("x = x + x.detach().to('cpu').mean()", '.to("cpu")', {WAIT}),
        ("x = x if x.sum() > 0 else -x", "bool(tensor)", {BRANCH, BREAK}),
        ("x = x + x[x > 0].sum()", "x[mask]", {WAIT, VARIES, BREAK}),
        ("x = x + (x > 0).nonzero().sum()", "nonzero", {WAIT, VARIES, BREAK}),
        ("x = x + x.masked_select(x > 0).sum()", "masked_select", {WAIT, VARIES, BREAK}),
        ("x = x + (x > 0).long().unique().sum()", "unique2", {WAIT, BREAK}),
        ("self.seen = torch.equal(x, x)", "torch.equal", {WAIT, BREAK}),
        ("self.seen = f'{x[0, 0]}'", "f'{tensor}'", {WAIT}),
    ],
)
def test_planted_waits(tmp_path, line, op, kinds):
    found = hazards(tmp_path, line)
    assert kinds <= kinds_at_the_line(found), found
    (wait,) = [h for h in found if h.op == op and h.kind in (WAIT, BRANCH)]
    assert wait.times == 1 and wait.remedy


@pytest.mark.parametrize(
    "line",
    [
        "pass",
        "x = torch.where(x > 0, x, 0)",
        "x = x.masked_fill(x > 0, 0.0); x[x > 1] = 0.0",
        "x = x[torch.tensor([0, 1])]",
        "x = x + x.topk(2, dim=-1).indices.sum()",
        "x = x.to(x.device); self.seen = x.shape[0]",
    ],
)
def test_clean_lines_are_clean(tmp_path, line):
    assert hazards(tmp_path, line) == []


def test_a_batch_that_varies_is_told_once(tmp_path):
    found = hazards(tmp_path, rows=1)
    assert [(h.kind, h.op) for h in found] == [(VARIES, "batch[0]")]
    assert "(8, 6), (9, 6)" in found[0].why


def test_a_line_that_runs_in_some_steps_has_one_size(tmp_path):
    """Whether it runs is another matter."""
    found = hazards(tmp_path, "self.seen += 1; x = x * 2 if self.seen % 2 else x")
    assert VARIES not in kinds_at_the_line(found)


@pytest.mark.parametrize(
    ("read", "sizes_an_operator"),
    [
        ("n = torch.tensor(self.seen).item()", True),
        ("n = torch.tensor([self.seen, 2]).tolist()[0]", True),
        ("n = self.seen; torch.tensor(n + 90).item()", False),
    ],
)
def test_what_sizes_an_operator_cannot_be_read_later(tmp_path, read, sizes_an_operator):
    found = hazards(tmp_path, f"self.seen += 1; {read}; x = x + x[:n].sum()")
    assert VARIES in kinds_at_the_line(found)
    (remedy,) = [h.remedy for h in found if h.op in (".item()", ".tolist()")]
    assert (remedy == SIZE) == sizes_an_operator


def test_the_backward_of_an_own_function_is_seen(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import torch, steplab\n"
        "class Peek(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): return x * 1\n"
        "    @staticmethod\n"
        "    def backward(ctx, g):\n"
        "        return g * float(g.max() > -1)\n"
        "def make():\n"
        "    def batches(size):\n"
        "        while True: yield torch.randn(size, 4)\n"
        "    loss = lambda m, x: Peek.apply(m(x)).mean()\n"
        "    return steplab.UserModel(torch.nn.Linear(4, 4), batches, loss)\n"
    )
    found = lint(RunSpec(named(f"{path}:make"), batch=2), steps=2)
    assert [h.kind for h in found] == [WAIT] and "own.py:7 (backward)" in found[0].line


@pytest.mark.parametrize(("recipe", "clean"), [("plain", True), ("impl.experts=loop", False)])
def test_a_built_in_workload(recipe, clean):
    small = {"hidden_size": 16, "n_decoder_layers": 1, "n_head": 2, "num_experts": 4, "d_ff": 16}
    shape = {"d_expert": 16, "seq_max_len": 32, "patch_length": 1, "horizons": "1,4"}
    config = find_workload("tsmoe").resolve("tiny", {**small, **shape})
    spec = RunSpec("tsmoe", config, "tiny", batch=2, recipe=parse_recipe(recipe))
    found = lint(spec, steps=2)
    assert (found == []) == clean
    if not clean:
        assert {WAIT, VARIES} <= {h.kind for h in found if "experts/loop.py" in h.line}


def test_a_model_that_fails_is_told_with_its_line(tmp_path):
    with pytest.raises(MeasurementError, match=rf"ZeroDivisionError.*own.py:{LINE}"):
        hazards(tmp_path, "x = x * (1 // 0)")


def test_kinds_stand_together_in_the_table():
    found = [Hazard(BREAK, "b.py:2", "op", "", ""), Hazard(WAIT, "a.py:1", "op", "", "", 2.0)]
    rows = hazard_table(found, "title", "").rows
    assert [row[0] for row in rows] == [WAIT, BREAK] and [row[3] for row in rows] == ["2", "-"]


def test_the_command(tmp_path, capsys):
    path, out = tmp_path / "own.py", tmp_path / "lint.json"
    path.write_text(FILE.format(line="self.seen = x.max().item()"))
    words = ["lint", f"{path}:make", "--device", "cpu", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert f"own.py:{LINE} (forward)" in printed and ".item()" in printed and out.exists()
    assert main([*words, "--fail"]) == 1
    path.write_text(FILE.format(line="pass"))
    assert main([*words, "--fail"]) == 0
    assert "no hazard" in capsys.readouterr().out
    assert main(["lint", f"{path}:make", "--steps", "1"]) == 2
    assert main(["lint", "nowhere.py:make"]) == 2


@pytest.mark.gpu
def test_waits_inside_of_cudas_operators(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FILE.format(line="x = x + torch.tensor(1.0, device=x.device)"))
    found = lint(RunSpec(named(f"{path}:make"), batch=4, device="cuda"), steps=2)
    assert WAIT in kinds_at_the_line(found), found


def test_breaks_with_nothing_between_them_are_all_told(tmp_path):
    line = "x = x[x[:, 0] > -9]; torch._dynamo.graph_break(); print(x.shape[0])"
    reasons = [h.op for h in hazards(tmp_path, line) if h.kind == BREAK]
    assert len(reasons) == 3 and "graph_break()" in reasons[1]


def test_a_factory_that_fails_is_told_with_its_line(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def make():\n    raise ValueError('no weights here')\n")
    with pytest.raises(MeasurementError, match=r"no weights here \(.*own.py:2 \(make\)\)"):
        lint(RunSpec(named(f"{path}:make")), steps=2)


@pytest.mark.parametrize("preset", ["production-training", "production-inference"])
def test_what_hides_the_operators_is_refused(preset):
    spec = RunSpec("gpt", find_workload("gpt").resolve("tiny", {}), recipe=parse_recipe(preset))
    with pytest.raises(UserError, match="Add compile=off"):
        lint(spec, steps=2)


class Announces(torch.nn.Module):
    """Breaks the graph where nothing is left to compute."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        print(end="")
        return y


def test_a_break_behind_the_last_operator_leaves_one_graph():
    (found,) = graph_breaks(Announces(), (torch.ones(2, 4),), {})
    assert found.why == ONE_GRAPH and "test_lint.py" in found.line


def test_what_compiles_as_one_graph_after_all_has_no_break(monkeypatch):
    monkeypatch.setattr("steplab.lint.lint._compiles_whole", lambda *call: True)
    assert graph_breaks(Announces(), (torch.ones(2, 4),), {}) == []


def test_a_break_in_a_library_names_its_line_and_the_callers():
    library = ("/env/lib/python3.11/site-packages/transformers/models/t5.py", 12, "bias")
    torchs = ("/env/lib/python3.11/site-packages/torch/_tensor.py", 99, "item")
    frames = [torchs, library, ("model.py", 5, "forward")]
    found = _break_hazard(GraphBreak("some reason", frames), "why")
    assert found.line == "models/t5.py:12 (bias), called at model.py:5 (forward)"
    assert _break_hazard(GraphBreak("r", frames[2:]), "").line == "model.py:5 (forward)"


def test_a_guard_that_fails_in_every_step(tmp_path):
    """The compiler fails after eight of them, and nothing was said."""
    (found,) = hazards(tmp_path, "self.seen += 1; x = x * self.seen")
    assert found.kind == RECOMPILES and f"own.py:{LINE} (forward)" in found.line
    assert "seen ==" in found.op
    assert hazards(tmp_path, "x = x * (2 if self.seen else 1); self.seen = 1") == []


COMPILED_UPDATE = """
import torch, steplab
from torch import nn

@torch.compile(backend="eager")
def orthogonal(g):
    x = g / (g.norm() + 1e-7)
    return 1.5 * x - 0.5 * x @ x.T @ x

class Muon(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(orthogonal(p.grad) if p.ndim == 2 else p.grad)

def make():
    def batches(size):
        while True:
            yield torch.randn(size, 6)
    return steplab.UserModel(
        nn.Linear(6, 6), batches, lambda m, x: m(x).square().mean(),
        optimizer=lambda model, **implementation: Muon(model.parameters()),
    )
"""


def test_an_optimizer_that_is_compiled_is_no_obstacle(tmp_path):
    path = tmp_path / "muon.py"
    path.write_text(COMPILED_UPDATE)
    entry = requested_workload(f"{path}:make")
    spec = RunSpec(named(f"{path}:make"), entry.resolve("", {}), batch=8)
    assert lint(spec, steps=2) == []

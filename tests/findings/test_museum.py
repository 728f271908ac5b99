"""The exhibits of examples/faults: for every rule at least one, with two twins that do the same."""

import ast
import inspect
from pathlib import Path
from unittest import mock

import pytest
import torch

from steplab.core import registry
from steplab.core.errors import Unsupported
from steplab.workloads.user_model import load_user_model

MUSEUM = Path(__file__).parents[2] / "examples" / "faults"
EXHIBITS = sorted(MUSEUM.glob("*.py"))


def constants(path: Path) -> dict[str, object]:
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("rule", "where")
    }


def test_every_rule_has_its_exhibit():
    shown = {constants(path)["rule"] for path in EXHIBITS}
    rules = set(registry.names("steplab.findings.rules", "RULE"))
    assert not rules - shown, f"no exhibit in examples/faults for {sorted(rules - shown)}"
    assert not shown - rules, f"exhibits of rules that do not exist: {sorted(shown - rules)}"
    assert {path.stem for path in EXHIBITS} >= rules - {"synchronization"}  # named for the fault


@pytest.mark.parametrize("path", EXHIBITS, ids=lambda path: path.stem)
def test_an_exhibit_has_two_factories_that_a_user_can_run(path):
    assert constants(path)["where"] in ("cpu", "cuda")
    assert f"examples/faults/{path.name}:faulty" in ast.get_docstring(ast.parse(path.read_text()))
    faulty, clean = (load_user_model(f"{path}:{twin}") for twin in ("faulty", "clean"))
    assert faulty.summary and clean.summary
    assert [f.name for f in inspect.signature(faulty.config).parameters.values()] == [
        f.name for f in inspect.signature(clean.config).parameters.values()
    ]


def first_loss(path: Path, twin: str, **config: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of the first step, from the same seed."""
    entry = load_user_model(f"{path}:{twin}")
    torch.manual_seed(0)
    needs_gpu = constants(path)["where"] == "cuda"
    with mock.patch("torch.cuda.is_available", return_value=needs_gpu):
        workload = entry.open(entry.resolve("", config))
        model = workload.model()
    batch = next(iter(workload.batches(4, torch.device("cpu"), 0)))
    loss = workload.loss(model, batch).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("twin", ["faulty", "clean"])
def test_what_only_a_gpu_shows_is_refused_without_one(twin):
    """On a CPU such an exhibit ran, and `explain` spoke of something else."""
    gpu_only = [path for path in EXHIBITS if constants(path)["where"] == "cuda"]
    assert len(gpu_only) > 5
    for path in gpu_only:
        entry = load_user_model(f"{path}:{twin}")
        with pytest.raises(Unsupported, match=r"needs (a GPU|two GPUs)"):
            entry.open(entry.resolve("", {})).model()


SMALL = {
    "attention_unfused": {"width": 16, "heads": 2, "context": 33, "layers": 1},
    "copies": {"width": 8, "context": 16, "layers": 2},
    "sync_in_loop": {"width": 8, "rows": 4, "layers": 2},
    "unfused_optimizer": {"width": 8, "layers": 2},
    "warmup_counted": {"width": 8, "rows": 4},
    "fragmentation": {"width": 8, "rows": 4},
    "wide_pooling": {"width": 2, "side": 16, "window": 5},
    "prefix_recomputed": {"width": 16, "prompt": 8, "tokens": 6},
    "long_convolution": {"samples": 512, "taps": 64, "width": 8},
}


@pytest.mark.parametrize("name", SMALL)
def test_twins_compute_the_same(name):
    path = MUSEUM / f"{name}.py"
    loss, gradients = first_loss(path, "faulty", **SMALL[name])
    other, others = first_loss(path, "clean", **SMALL[name])
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(gradients, others)


def test_weight_decay_has_the_gradient_of_the_penalty():
    """After one update, up to the rounding of two orders of a sum."""
    path = MUSEUM / "weight_penalty.py"
    import sys

    load_user_model(f"{path}:faulty")
    module = sys.modules["weight_penalty"]
    moved = []
    for twin in (module.faulty, module.clean):
        torch.manual_seed(0)
        made = twin(width=16, layers=2)
        optimizer = made.optimizer(made.model)
        made.loss(made.model, next(iter(made.batches(4)))).backward()
        optimizer.step()
        moved.append([p.detach() for p in made.model.parameters()])
    torch.testing.assert_close(*moved)


def test_norms_of_rows_are_those_of_transposed_states():
    """In fp32: two orders of a sum differ by several roundings of the exhibit's bf16."""
    import sys

    load_user_model(f"{MUSEUM / 'transposed_norm.py'}:faulty")
    rows, transposed = (sys.modules["transposed_norm"].Layer(8, twin) for twin in (True, False))
    transposed.load_state_dict(rows.state_dict())
    x_BTC = torch.randn(4, 16, 8)
    torch.testing.assert_close(rows(x_BTC), transposed(x_BTC))


def test_chunked_logits_give_the_same_loss(monkeypatch):
    path = MUSEUM / "full_logits.py"
    monkeypatch.setattr("os.sysconf", lambda name: 2**15)
    config = {"vocabulary": 64, "width": 8}
    loss, gradients = first_loss(path, "faulty", **config)
    other, others = first_loss(path, "clean", **config)
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(gradients, others)


def test_a_mixture_with_room_for_all_gives_what_the_loop_gives(monkeypatch):
    path = MUSEUM / "small_expert_matmuls.py"
    config = {"width": 8, "hidden": 16, "experts": 4, "context": 8}
    loss, gradients = first_loss(path, "faulty", **config)
    import sys

    load_user_model(f"{path}:clean")
    module = sys.modules["small_expert_matmuls"]
    torch.manual_seed(0)
    made = module.clean(**config)
    monkeypatch.setattr(module, "ROOM", 4.0)
    other = made.loss(made.model, next(iter(made.batches(4))))
    other.backward()
    torch.testing.assert_close(loss, other.detach())
    torch.testing.assert_close(gradients, [p.grad for p in made.model.parameters()])

import sys
import types
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steplab.core.errors import UserError
from steplab.step.assemble import assemble, find_device, micro_batches
from steplab.step.step import CUDA_GRAPHS


def weights(step):
    return torch.cat([p.detach().flatten() for p in step.model.parameters()])


def test_full_step_equals_a_loop_written_by_hand(tiny_spec):
    """Bit for bit: the Step adds nothing to forward, backward, clip, update."""
    spec = tiny_spec()
    step, twin = assemble(spec), assemble(spec)
    feed, feed_twin = micro_batches(step, spec), micro_batches(twin, spec)
    model, optimizer = twin.model, twin.optimizer
    for _ in range(3):
        loss = step(next(feed)).loss
        ((tokens, targets),) = next(feed_twin)
        by_hand = model(tokens, targets)
        by_hand.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, by_hand)
    assert torch.equal(weights(step), weights(twin))


class Operators(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += (
            not func.is_view and func.name() != "aten::detach"
        )
        return func(*args, **(kwargs or {}))


def test_one_micro_batch_needs_no_operator_beside_those_of_its_loss(tiny_spec):
    step = assemble(tiny_spec(mode="forward+backward"))
    (batch,) = next(micro_batches(step, tiny_spec()))
    step([batch])
    with Operators() as by_hand:
        step.model(*batch).backward()
    step.model.zero_grad()
    with Operators() as ours:
        step([batch])
    assert ours.calls - by_hand.calls == {"clone": 1} and not by_hand.calls - ours.calls


def test_accumulation_equals_one_large_batch(tiny_spec):
    step, twin = (assemble(tiny_spec()) for _ in range(2))
    step.model.double(), twin.model.double()
    spec = tiny_spec(accumulate=4)
    parts = next(micro_batches(step, spec))
    whole = [tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))]
    small, large = step(parts).loss, twin(whole).loss
    torch.testing.assert_close(small, large, rtol=1e-12, atol=0)
    torch.testing.assert_close(weights(step), weights(twin), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("mode", "phases"),
    [
        ("infer", ["forward"]),
        ("forward", ["forward"]),
        ("forward+backward", ["forward", "backward"]),
        ("full", ["forward", "backward", "clip", "optimizer"]),
    ],
)
def test_modes_go_as_far_as_they_say(tiny_spec, mode, phases):
    import contextlib

    spec = tiny_spec(mode=mode)
    step = assemble(spec)
    seen = []

    @contextlib.contextmanager
    def watch(phase):
        seen.append(phase)
        yield

    step.watch = watch
    before = weights(step)
    output = step(next(micro_batches(step, spec)))
    assert seen == phases
    assert torch.equal(before, weights(step)) == (mode != "full")
    assert all(p.grad is None for p in step.model.parameters())
    assert not output.loss.requires_grad
    assert step.model.training == (mode != "infer")


def test_forward_keeps_a_graph_and_infer_does_not(tiny_spec):
    grads = {}
    for mode in ("infer", "forward"):
        spec = tiny_spec(mode=mode)
        step = assemble(spec)
        step.model.norm.register_forward_hook(
            lambda m, i, out, mode=mode: grads.update({mode: out[0].requires_grad})
        )
        step(next(micro_batches(step, spec)))
    assert grads == {"infer": False, "forward": True}


def test_clip_bounds_the_gradient(tiny_spec):
    spec = tiny_spec(clip=1e-3)
    step = assemble(spec)
    norms = []
    original = step.optimizer.step

    def spy(*args, **kwargs):
        grads = [p.grad for p in step.model.parameters()]
        norms.append(torch.cat([g.flatten() for g in grads]).norm().item())
        return original(*args, **kwargs)

    step.optimizer.step = spy
    step(next(micro_batches(step, spec)))
    assert norms[0] == pytest.approx(1e-3, rel=1e-3)


def test_one_assembly_does_not_leak_into_the_next(tiny_spec):
    torch.set_float32_matmul_precision("high")
    assemble(tiny_spec())
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_same_spec_gives_the_same_losses(tiny_spec):
    runs = []
    for _ in range(2):
        step = assemble(tiny_spec())
        feed = micro_batches(step, tiny_spec())
        runs.append([step(next(feed)).loss.item() for _ in range(3)])
    assert runs[0] == runs[1]


def test_an_eager_step_imports_no_inductor(tiny_spec, monkeypatch):
    """Its import took longer than the first step of a small model, and was counted in it."""
    marked = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append(1))
    step = assemble(tiny_spec())
    feed = micro_batches(step, tiny_spec())
    monkeypatch.delitem(sys.modules, CUDA_GRAPHS, raising=False)
    step(next(feed))
    assert marked == []
    monkeypatch.setitem(sys.modules, CUDA_GRAPHS, types.ModuleType(CUDA_GRAPHS))
    step(next(feed))
    assert marked == [1]


def test_devices():
    assert find_device("cpu").type == "cpu"
    with pytest.raises(UserError, match="no device"):
        find_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="torch sees no GPU"):
            find_device("cuda")

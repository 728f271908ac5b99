import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steplab.core import MemoryTimeline, RunSpec
from steplab.core.errors import MeasurementError, Unsupported
from steplab.core.run import MEMORY_KINDS
from steplab.probes import allocator, memory_timeline
from steplab.probes.allocator import (
    Change,
    Recording,
    SegmentChange,
    cuda_recording,
    largest_gap,
    read_snapshots,
    reserved_ranges,
)
from steplab.probes.compilation import graph_count
from steplab.probes.environment import capture_environment
from steplab.probes.memory_timeline import BlockFinder, build_blocks, record_memory, thinned
from steplab.probes.probe import Subject
from steplab.step.assemble import assemble, micro_batches
from steplab.workloads.workload import StepOutput

WIDTHS = (24, 96, 48, 8)
BATCH = 16
FLOAT = 4


class Chain(nn.Module):
    """Linear, ReLU, Linear, ReLU, Linear; `recompute` checkpoints the middle."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        a, b, c, d = WIDTHS
        self.first = nn.Sequential(nn.Linear(a, b), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(b, c), nn.ReLU())
        self.last = nn.Linear(c, d)
        self.recompute = recompute

    def forward(self, x_BA: Tensor) -> Tensor:
        x_BB = self.first(x_BA)
        if self.recompute:
            x_BC = checkpoint(self.middle, x_BB, use_reentrant=False, preserve_rng_state=False)
        else:
            x_BC = self.middle(x_BB)
        return self.last(x_BC)


class ChainWorkload:
    """The loss is the mean square of the output: its input is all that it saves."""

    def __init__(self, recompute: bool = False) -> None:
        self.recompute = recompute

    def model(self) -> nn.Module:
        return Chain(self.recompute)

    def tokens(self, batch: int) -> int:
        return batch

    def batches(self, batch: int, device: torch.device, seed: int) -> Iterator[Tensor]:
        while True:
            yield torch.randn(batch, WIDTHS[0], device=device)

    def loss(self, model: nn.Module, batch: Tensor) -> StepOutput:
        return StepOutput(model(batch).square().mean())

    def predict(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)

    def optimizer(self, model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **implementation)


def chain(warm: int = 1, recompute: bool = False, device: str = "cpu", **changes) -> Subject:
    spec = RunSpec("chain", batch=BATCH, device=device, **changes)
    step = assemble(spec, ChainWorkload(recompute))
    return warmed(Subject(step, micro_batches(step, spec), spec, capture_environment()), warm)


def assembled(spec: RunSpec, warm: int = 1) -> Subject:
    step = assemble(spec)
    return warmed(Subject(step, micro_batches(step, spec), spec, capture_environment()), warm)


def warmed(subject: Subject, steps: int) -> Subject:
    for _ in range(steps):
        subject.run_step()
    return subject


def parameter_bytes(subject: Subject) -> int:
    return sum(p.numel() * p.element_size() for p in subject.step.model.parameters())


def model_bytes(subject: Subject) -> int:
    return parameter_bytes(subject) + sum(b.nbytes for b in subject.step.model.buffers())


def ends(timeline: MemoryTimeline) -> tuple[dict[str, int], dict[str, int]]:
    held = timeline.bytes_by_kind
    return {k: held[k][0] for k in MEMORY_KINDS}, {k: held[k][-1] for k in MEMORY_KINDS}


def check_sums(timeline: MemoryTimeline) -> None:
    """The peak is the largest sum over kinds, and is among the points."""
    totals = [sum(point) for point in zip(*timeline.bytes_by_kind.values(), strict=True)]
    assert max(totals) == timeline.peak_bytes == sum(timeline.peak_by_kind.values())
    peak = totals.index(timeline.peak_bytes)
    assert timeline.times_ms[peak] == timeline.peak_ms
    assert {k: v[peak] for k, v in timeline.bytes_by_kind.items()} == timeline.peak_by_kind
    assert len(timeline.times_ms) <= 2000
    assert list(timeline.times_ms) == sorted(timeline.times_ms)
    assert min(min(values) for values in timeline.bytes_by_kind.values()) >= 0


def most(timeline: MemoryTimeline, kind: str) -> int:
    return max(timeline.bytes_by_kind[kind])


def test_bytes_of_a_chain_are_those_counted_by_hand():
    subject = chain()
    timeline = record_memory(subject)
    check_sums(timeline)
    a, b, c, d = (BATCH * width * FLOAT for width in WIDTHS)
    assert timeline.saved_by_module == {
        "first.1": b,  # a ReLU saves its result, which is the next Linear's input
        "middle.1": c,
        "first.0": a,
        "(outside the model)": d,  # the square
    }
    assert most(timeline, "activations") == b + c + d + FLOAT  # and the loss lives on into backward
    assert most(timeline, "weights") == parameter_bytes(subject)
    assert most(timeline, "gradients") == parameter_bytes(subject)
    parameters = len(list(subject.step.model.parameters()))
    state = 2 * parameter_bytes(subject) + parameters * FLOAT  # two moments and a step count
    assert most(timeline, "optimizer state") == state
    assert timeline.source == "profiler memory events"


def test_only_weights_state_and_the_new_batch_outlive_a_step():
    subject = chain()
    before, after = ends(record_memory(subject))
    batch = BATCH * WIDTHS[0] * FLOAT
    assert after == before | {"other": batch}
    assert before["activations"] == before["gradients"] == before["temporaries"] == 0


def test_optimizer_state_made_in_the_step_is_known_as_such():
    subject = chain(warm=0)
    before, after = ends(record_memory(subject))
    assert before["optimizer state"] == 0
    assert after["optimizer state"] >= 2 * parameter_bytes(subject)


def test_allocations_have_shape_module_op_and_line():
    timeline = record_memory(chain())
    relu = next(one for one in timeline.largest if one.module == "first.1")
    assert (relu.kind, relu.shape, relu.dtype) == ("activations", (BATCH, WIDTHS[1]), "float32")
    assert relu.op == "aten::clamp_min"
    assert "test_memory_timeline.py:" in relu.line and relu.line.endswith("(forward)")
    weight = next(one for one in timeline.at_peak if one.kind == "weights")
    assert weight.shape == (WIDTHS[1], WIDTHS[0]) or weight.shape == (WIDTHS[2], WIDTHS[1])
    assert weight.module in ("first.0", "middle.0")
    sizes = [one.bytes for one in timeline.at_peak]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) <= 20


def test_inference_holds_no_activations():
    timeline = record_memory(chain(mode="infer"))
    check_sums(timeline)
    assert most(timeline, "activations") == most(timeline, "gradients") == 0
    assert most(timeline, "temporaries") > 0 and not timeline.saved_by_module
    assert list(timeline.phases_ms) == ["data", "forward"]


def test_a_forward_alone_frees_what_it_saved():
    timeline = record_memory(chain(mode="forward"))
    check_sums(timeline)
    b, c, d = (BATCH * width * FLOAT for width in WIDTHS[1:])
    assert most(timeline, "activations") == b + c + d
    assert timeline.bytes_by_kind["activations"][-1] == 0


def test_micro_batches_are_phases_of_their_own():
    subject = chain(mode="forward+backward", accumulate=2)
    timeline = record_memory(subject)
    check_sums(timeline)
    names = ["data", "forward", "backward", "forward 2", "backward 2"]
    assert list(timeline.phases_ms) == names
    spans = list(timeline.phases_ms.values())
    assert spans == sorted(spans) and all(begin <= end for begin, end in spans)
    assert most(timeline, "gradients") == parameter_bytes(subject)
    a, b, c, d = (BATCH * width * FLOAT for width in WIDTHS)
    assert sum(timeline.saved_by_module.values()) == a + b + c + d
    # The first loss is alive while the second forward's activations are.
    assert most(timeline, "activations") == b + c + d + 2 * FLOAT


def test_a_checkpointed_module_saves_nothing_and_recomputes_temporaries():
    timeline = record_memory(chain(recompute=True))
    check_sums(timeline)
    b, c, d = (BATCH * width * FLOAT for width in WIDTHS[1:])
    assert "middle.1" not in timeline.saved_by_module
    assert timeline.saved_by_module["last"] == c
    assert most(timeline, "activations") == b + c + d + FLOAT


def test_nothing_stays_installed():
    subject = chain()
    watch = subject.step.watch
    record_memory(subject)
    assert subject.step.watch is watch
    for module in subject.step.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_step_that_fails_leaves_nothing_installed(monkeypatch):
    subject = chain()
    watch = subject.step.watch

    def fail(*_):
        raise RuntimeError("no loss")

    monkeypatch.setattr(subject.step, "forward", fail)
    with pytest.raises(RuntimeError, match="no loss"):
        record_memory(subject)
    assert subject.step.watch is watch
    assert not any(m._forward_hooks for m in subject.step.model.modules())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_the_watched_step_computes_the_same():
    losses = []
    for watched in (False, True):
        subject = chain()
        if watched:
            record_memory(subject)
        else:
            subject.run_step()
        losses.append(subject.run_step().loss.item())
    assert losses[0] == losses[1]


def test_nothing_is_kept_alive():
    subject = chain(mode="forward")
    alive = living_tensors()
    record_memory(subject)
    assert living_tensors() <= alive


def living_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


def test_tiny_gpt_counts_weights_once_and_agrees_with_the_profilers_total(tiny_spec):
    subject = assembled(tiny_spec())
    record_memory(subject)  # from now on the profiler knows the batch that the next step frees
    growth = profiled_growth(subject)
    timeline = record_memory(subject)
    check_sums(timeline)
    assert most(timeline, "weights") == model_bytes(subject)  # the rotary table is shared
    assert most(timeline, "gradients") == parameter_bytes(subject)
    assert timeline.peak_bytes - sum(ends(timeline)[0].values()) == growth
    rotary = {name for name in timeline.saved_by_module if name.endswith("rotary")}
    assert rotary <= {f"blocks.{n}.attention.rotary" for n in range(2)}


def profiled_growth(subject: Subject) -> int:
    """The most by which the profiler's own running total rose in one step."""
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    options = {"profile_memory": True, "acc_events": True}
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        subject.run_step()
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    seen = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            seen.append((event.start_time_ns, event.extra_fields))
    fields = [extra for _, extra in sorted(seen, key=lambda pair: pair[0])]
    start = fields[0].total_allocated - fields[0].alloc_size
    return max(extra.total_allocated for extra in fields) - start


def test_autocast_copies_of_weights_are_activations(tiny_spec):
    plain, half = (record_memory(assembled(tiny_spec(r))) for r in ("plain", "precision=bf16"))
    copy = 64 * 32 * 2  # the head's weight in two bytes
    inputs = 2 * 16 * 32 * 2  # those of the head, two bytes less each; log-softmax stays fp32
    assert half.saved_by_module["loss"] == plain.saved_by_module["loss"] - inputs + copy


def test_a_step_that_compiles_while_it_is_recorded_is_refused(monkeypatch):
    counts = iter((3, 4))
    monkeypatch.setattr(memory_timeline, "graph_count", lambda: next(counts))
    with pytest.raises(MeasurementError, match="compiled while"):
        record_memory(chain())


@pytest.mark.parametrize("scope", ["blocks", "whole"])
def test_compiled_modules_are_not_recompiled_and_notes_say_what_is_hidden(tiny_spec, scope):
    recipe = f"compile={scope},compile.backend=aot_eager"
    subject = assembled(tiny_spec(recipe), warm=2)
    graphs = graph_count()
    timeline = record_memory(subject)
    check_sums(timeline)
    assert graph_count() == graphs
    assert any("compiled" in note for note in timeline.notes)
    assert most(timeline, "activations") > 0
    assert not any(name.startswith("blocks") for name in timeline.saved_by_module)
    assert next(iter(timeline.saved_by_module)) == "(model)"
    torch._dynamo.reset()


def test_memory_known_to_the_allocator_is_paired_exactly():
    """Two blocks follow each other at one address; the third was there before."""
    changes = [Change(10, 1, 100), Change(20, 1, -100), Change(20, 1, 60), Change(30, 7, -8)]
    blocks = build_blocks({}, changes)
    assert [(b.bytes, b.allocated, b.freed) for b in blocks] == [
        (100, 0, 1),
        (60, 2, None),
        (8, -1, 3),
    ]
    finder = BlockFinder(blocks, changes)
    assert finder.find(1, 9) is None
    assert finder.find(1, 15) is blocks[0] and finder.find(1, 20) is blocks[1]
    assert finder.find(7, 29) is blocks[2] and finder.find(7, 30) is None


@pytest.mark.parametrize("changes", [1, 1999, 2001, 12_345])
def test_thinning_keeps_the_ends_and_the_peak(changes):
    totals = np.random.default_rng(changes).integers(0, 2**40, changes + 1)
    kept = thinned(totals)
    assert len(kept) <= 2000 and list(kept) == sorted(set(kept))
    assert {0, changes, int(totals.argmax())} <= set(kept.tolist())


def test_free_pieces_of_reserved_memory():
    changes = [
        SegmentChange(-1, 0, 100),
        SegmentChange(-1, 100, 50),  # adjacent, but of another driver call: a separate piece
        SegmentChange(3, 1000, 40, grows=True),
        SegmentChange(4, 1040, 40, grows=True),  # an expandable segment grows: one piece
        SegmentChange(6, 1060, -20),
        SegmentChange(8, 0, -100),
    ]
    assert reserved_ranges(changes, 3) == [(0, 100), (100, 150)]
    assert reserved_ranges(changes, 5) == [(0, 100), (100, 150), (1000, 1080)]
    assert reserved_ranges(changes, 7) == [(0, 100), (100, 150), (1000, 1060)]
    assert reserved_ranges(changes, 9) == [(100, 150), (1000, 1060)]
    assert largest_gap([(0, 100), (100, 150)], []) == 100
    assert largest_gap([(0, 100), (100, 150)], [(30, 40), (0, 10)]) == 60
    assert largest_gap([(0, 100)], [(0, 100)]) == 0


def allocator_entry(action: str, address: int, size: int, time_us: int, *frames) -> dict:
    named = [{"filename": f, "line": 7, "name": "forward"} for f in frames]
    return {"action": action, "addr": address, "size": size, "time_us": time_us, "frames": named}


def test_the_allocators_history_is_read():
    blocks = [
        {"address": 0, "size": 512, "requested_size": 400, "state": "active_allocated"},
        {"address": 512, "size": 1536, "requested_size": 0, "state": "inactive"},
    ]
    place = {"address": 0, "total_size": 2048, "segment_pool_id": (0, 0), "blocks": blocks}
    segments = [
        {"device": 0, **place},
        {"device": 1, **place},
        {
            **{"device": 0, "address": 9000, "total_size": 2048, "segment_pool_id": (0, 1)},
            "blocks": [{**block, "address": 9000 + block["address"]} for block in blocks],
        },
    ]
    inside = f"{torch.__path__[0]}/nn/functional.py"
    history = [
        allocator_entry("alloc", 512, 100, 5, inside, "/home/me/model.py"),
        allocator_entry("segment_alloc", 4096, 2048, 6),
        allocator_entry("alloc", 4096, 200, 4),
        allocator_entry("free_requested", 512, 100, 8),
        allocator_entry("free_completed", 512, 100, 8),
    ]
    recording = Recording("cuda allocator")
    read_snapshots(recording, segments, history, device=0)
    assert recording.held == {0: 400, 9000: 400}
    assert recording.changes == [
        Change(5000, 512, 100, "me/model.py:7 (forward)"),
        Change(5000, 4096, 200),  # never before the one that it follows
        Change(8000, 512, -100),
    ]
    assert recording.segments is not None
    assert recording.segments[-1] == SegmentChange(1, 4096, 2048)
    # Of a graph's own pool what is taken: nobody else can have the rest.
    assert sum(one.bytes for one in recording.segments) == 2 * 2048 + 512
    assert "CUDA graphs hold 2.00 KiB" in recording.notes[0]


def test_a_history_that_lost_its_beginning_is_refused(monkeypatch):
    monkeypatch.setattr(allocator, "MAX_ENTRIES", 2)
    history = [allocator_entry("alloc", 1, 1, 1)] * 2
    with pytest.raises(MeasurementError, match="more than 2 allocations"):
        read_snapshots(Recording(""), [], history, device=0)


def test_another_cuda_allocator_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(Unsupported, match="own CUDA allocator"), cuda_recording():
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["plain", "precision=bf16,optimizer=fused"])
def test_peak_is_the_cuda_allocators_own(tiny_spec, recipe):
    subject = assembled(tiny_spec(recipe, device="cuda", batch=8), warm=3)
    timeline = record_memory(subject)
    check_sums(timeline)
    counter = torch.cuda.memory_stats()
    assert timeline.peak_bytes == counter["requested_bytes.all.peak"]
    counted = torch.cuda.max_memory_allocated()
    live = counter["allocation.all.peak"]
    assert 0 <= counted - timeline.peak_bytes <= live * 2**20
    assert timeline.reserved_bytes is not None and timeline.largest_free_block is not None
    assert timeline.reserved_bytes >= counted
    assert 0 <= timeline.largest_free_block <= timeline.reserved_bytes - timeline.peak_bytes
    assert sum(ends(timeline)[1].values()) == counter["requested_bytes.all.current"]


@pytest.mark.gpu
def test_watching_does_not_change_the_peak_on_a_gpu(tiny_spec):
    subject = assembled(tiny_spec(device="cuda", batch=8), warm=3)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    subject.run_step()
    torch.cuda.synchronize()
    plain = torch.cuda.max_memory_allocated()
    record_memory(subject)
    assert torch.cuda.max_memory_allocated() == plain


@pytest.mark.gpu
def test_kinds_on_a_gpu_are_those_counted_by_hand():
    subject = chain(warm=2, device="cuda")
    timeline = record_memory(subject)
    check_sums(timeline)
    a, b, c, d = (BATCH * width * FLOAT for width in WIDTHS)
    assert timeline.saved_by_module == {
        "first.1": b,
        "middle.1": c,
        "first.0": a,
        "(outside the model)": d,
    }
    assert most(timeline, "activations") == b + c + d + FLOAT
    assert most(timeline, "weights") == most(timeline, "gradients") == parameter_bytes(subject)
    # The step counts stay on the host.
    assert most(timeline, "optimizer state") == 2 * parameter_bytes(subject)
    assert timeline.source == "cuda allocator"
    relu = next(one for one in timeline.largest if one.module == "first.1")
    assert "test_memory_timeline.py:" in relu.line and relu.shape == (BATCH, WIDTHS[1])


@pytest.mark.gpu
def test_a_forward_alone_frees_everything_on_a_gpu():
    before, after = ends(record_memory(chain(mode="forward", warm=2, device="cuda")))
    assert after["activations"] == after["temporaries"] == 0
    assert after["weights"] == before["weights"]

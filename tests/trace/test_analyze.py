"""The whole of it, on timelines with known answers and on traces of real steps on a CPU."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from steplab.step.assemble import assemble, micro_batches
from steplab.trace.analysis import Analysis
from steplab.trace.analyze import analyze
from steplab.trace.events import Trace
from steplab.trace.load import load_trace
from tests.trace.traces import AUTOGRAD, call, kernel, launched, op, range_, trace_of

NODE = "autograd::engine::evaluate_function: MmBackward0"
B200 = {"deviceProperties": [{"id": 0, "name": "NVIDIA B200"}]}


def texts(analysis: Analysis, column: str) -> list[str]:
    return [analysis.work.labels[code] for code in getattr(analysis.work, column)]


def test_kernels_belong_to_the_phase_that_launched_them_not_to_the_one_they_run_in():
    """The host is through with the whole step before the first kernel begins."""
    phases = {"forward": 0, "backward": 1_000, "optimizer": 2_000}
    events = [range_("ProfilerStep#1", 0, 3_000)]
    for number, (phase, at) in enumerate(phases.items(), 1):
        late = 100_000 * number
        events += [range_(phase, at, 900), *launched("k", at + 10, at + 20, late, 99_000, number)]
    found = analyze(trace_of(events))
    assert texts(found, "phase") == ["forward", "backward", "optimizer"]
    assert found.work.step.tolist() == [1, 1, 1]
    assert found.work.launched.tolist() == [20, 1_020, 2_020]
    # Each runs while the next phase's range is over too: a clock of the device would be wrong.
    assert (found.work.start > 3_000).all()


def test_a_graph_replayed_by_one_launch_belongs_to_the_phase_of_that_launch():
    events = [
        range_("ProfilerStep#5", 0, 1_000),
        range_("forward", 0, 100),
        call("cudaGraphLaunch", 10, 50, 1),
        range_("backward", 200, 300),
        op(NODE, 210, 200, AUTOGRAD),
        call("cudaGraphLaunch", 220, 50, 2, AUTOGRAD),
        *[kernel("nvjet_tst_64x64_TNN", 5_000 + 100 * i, 90, 1, graph=1) for i in range(7)],
        *[kernel("nvjet_tst_64x64_TNN", 9_000 + 100 * i, 90, 2, graph=2) for i in range(5)],
    ]
    found = analyze(trace_of(events))
    assert texts(found, "phase") == ["forward"] * 7 + ["backward"] * 5
    assert found.work.step.tolist() == [5] * 12
    assert set(texts(found, "module")) == {"unattributed"}


def test_a_foreign_trace_tells_its_card():
    shapes = {"shapes": [[64, 64], [64, 64]], "dtypes": ["c10::BFloat16", "c10::BFloat16"]}
    events = [op("aten::mm", 0, 50, **shapes), *launched("nvjet_tst_TNN", 10, 20, 90, 500)]
    events += launched("nvjet_tst_TNN", 200, 220, 700, 500, 2)
    found = analyze(trace_of(events, properties=B200))
    assert found.work.flops[0] == 2 * 64**3 and np.isnan(found.work.flops[1])
    assert "B200" in found.budget.peaks["bf16"]
    assert texts(found, "matmul_dtype") == ["bf16", "unattributed"]
    known = analyze(trace_of(events), device_name="NVIDIA H200")
    assert "H200" in known.budget.peaks["bf16"]
    assert np.isnan(analyze(trace_of(events)).work.ideal).all()


def test_labels_begin_with_unattributed_and_codes_fit_in():
    found = analyze(
        trace_of(
            [range_("forward", 0, 90), *launched("k", 10, 20, 30), *launched("k", 50, 60, 70, 5, 2)]
        )
    )
    assert found.work.labels[0] == "unattributed"
    assert len(set(found.work.labels)) == len(found.work.labels)
    for column in ("name", "category", "phase", "module", "line", "op", "matmul_dtype"):
        assert getattr(found.work, column).max() < len(found.work.labels)


def test_analysis_leaves_torch_out():
    modules = "steplab.trace.analyze, steplab.trace.kernel_table"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    source = Path(__file__).parents[2] / "src"
    assert subprocess.run([sys.executable, "-c", code], cwd=source, check=False).returncode == 0


@pytest.fixture(scope="module")
def tiny_gpt(tmp_path_factory) -> tuple[Trace, Trace]:
    """A lean trace of two steps and a detailed one of one more, of a GPT of two blocks."""
    from steplab.core import RunSpec
    from steplab.techniques.recipes import parse_recipe
    from steplab.workloads.workload import find_workload

    small = {"width": 32, "ff_width": 64, "layers": 2, "heads": 2, "context": 16, "vocab_size": 64}
    config = find_workload("gpt").resolve("tiny", small)
    spec = RunSpec("gpt", config, "tiny", batch=2, recipe=parse_recipe("impl.attention=math"))
    step = assemble(spec)
    batches = micro_batches(step, spec)
    step.watch = record_function
    step(next(batches))
    folder = tmp_path_factory.mktemp("traces")

    def record(name: str, steps: int, **options: bool) -> Trace:
        plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=plan,
            acc_events=True,
            on_trace_ready=lambda done: done.export_chrome_trace(str(folder / name)),
            **options,
        ) as profiler:
            for _ in range(steps + 1):
                step(next(batches))
                profiler.step()
        return load_trace(folder / name)

    lean = record("lean.json", 2)
    with ExitStack() as hooks:
        for path, module in step.model.named_modules():
            _mark(hooks, path, module)
        detail = record("detail.json", 1, with_stack=True, record_shapes=True)
    return lean, detail


def _mark(hooks: ExitStack, path: str, module: torch.nn.Module) -> None:
    open_: list[record_function] = []

    def enter(*_: object) -> None:
        open_.append(record_function(f"module:{path}"))
        open_[-1].__enter__()

    def leave(*_: object) -> None:
        open_.pop().__exit__(None, None, None)

    for handle in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave)):
        hooks.callback(handle.remove)


def products(analysis: Analysis, phase: str, step: int) -> int:
    work = analysis.work
    is_product = np.char.startswith(np.array(texts(analysis, "category")), "matmul")
    in_phase = np.array(texts(analysis, "phase")) == phase
    return int((is_product & in_phase & (work.step == step)).sum())


# Two blocks of q, k, v, out, gate, up, down and two products of attention, and the head.
FORWARD_PRODUCTS = 2 * (7 + 2) + 1


def test_the_products_of_a_gpt_are_as_many_as_its_formula_says(tiny_gpt):
    lean, detail = tiny_gpt
    alone = analyze(detail)
    (window,) = alone.windows
    assert products(alone, "forward", window.number) == FORWARD_PRODUCTS
    assert products(alone, "backward", window.number) == 2 * FORWARD_PRODUCTS
    assert products(alone, "optimizer", window.number) == 0
    both = analyze(lean, detail)
    assert [w.number for w in both.windows] == [1, 2]
    for number in (1, 2):
        assert products(both, "forward", number) == FORWARD_PRODUCTS
        assert products(both, "backward", number) == 2 * FORWARD_PRODUCTS


def test_forward_and_backward_of_a_module_are_found_by_its_path(tiny_gpt):
    found = analyze(*tiny_gpt)
    work = found.work
    module, phase = np.array(texts(found, "module")), np.array(texts(found, "phase"))
    is_product = np.array(texts(found, "category")) == "matmul fp32 simt"
    for path in ("blocks.0.attention.q", "blocks.1.feed_forward.down", "loss"):
        here = (module == path) & is_product & (work.step == 2)
        assert sorted(phase[here]) == ["backward", "backward", "forward"]
    line = np.array(texts(found, "line"))
    down = line[(module == "blocks.1.feed_forward.down") & is_product]
    assert {text.split(":")[0] for text in down} == {"steplab/workloads/gpt/model.py"}
    assert all("(forward)" in text for text in down)


def test_nearly_all_of_a_lean_trace_is_matched(tiny_gpt):
    lean, detail = tiny_gpt
    found = analyze(lean, detail)
    inside = found.work.step >= 0
    borrowed = found.work.op_row >= 0
    assert found.work.duration[inside & borrowed].sum() > 0.95 * found.work.duration[inside].sum()
    lent = [detail.text(code) for code in detail.ops.name[found.work.op_row[borrowed]]]
    assert lent == np.array(texts(found, "name"))[borrowed].tolist()


def test_self_times_sum_to_the_time_of_the_outermost_operators(tiny_gpt):
    trace = tiny_gpt[0]
    found = analyze(trace)
    for thread in np.unique(trace.ops.thread):
        own = trace.ops.thread == thread
        start, end = trace.ops.start[own], trace.ops.end[own]
        reached = np.concatenate(([0], np.maximum.accumulate(end)[:-1]))
        outermost = start >= reached
        whole = int((end - start)[outermost].sum())
        assert int(found.work.duration[own].sum()) == whole


def test_all_phases_of_our_step_have_work(tiny_gpt):
    found = analyze(*tiny_gpt)
    assert {"forward", "backward", "clip", "optimizer"} <= set(texts(found, "phase"))

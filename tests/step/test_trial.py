import gc
import math
import weakref

import pytest
import torch

from steplab.core import RunSpec, run_from_json, run_to_json
from steplab.step import trial as trial_module
from steplab.step.failures import is_out_of_memory, memory_sentence
from steplab.step.trial import trial
from tests.own_models import named
from tests.step.syncs import run_without_syncs


@pytest.fixture(scope="module")
def run(request):
    spec = request.getfixturevalue("module_spec")
    return trial(spec)


@pytest.fixture(scope="module")
def module_spec():
    from steplab.core import RunSpec
    from steplab.workloads.workload import find_workload

    config = find_workload("gpt").resolve("tiny", {"layers": 2, "context": 16})
    return RunSpec("gpt", config, "tiny", batch=2, steps=7, warmup=2, accumulate=2)


def test_a_run_has_every_part(run):
    assert run.status == "ok", run.reason
    assert len(run.clock.step) == len(run.clock.host) == len(run.clock.data_wait) == 7
    assert set(run.clock.phases) == {"forward", "backward", "clip", "optimizer"}
    assert run.work.tokens == 2 * 2 * 16
    assert len(run.losses) == 7 and all(math.isfinite(loss) for loss in run.losses)
    assert run.memory.peak >= run.memory.before > 0
    assert run.figures.mfu is None and run.compilation is None and run.counters is None


def test_clocks_agree(run):
    """Step periods tile the window; phases and data wait lie inside their step."""
    assert run.clock.agreement == pytest.approx(1, abs=0.05)
    for i, period in enumerate(run.clock.step.values):
        inside = sum(samples.values[i] for samples in run.clock.phases.values())
        assert inside + run.clock.data_wait.values[i] <= period


def test_a_run_goes_through_json(run):
    assert run_from_json(run_to_json(run)) == run


def test_infer_has_no_loss(tiny_spec):
    assert trial(tiny_spec(mode="infer")).losses == ()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
        (MemoryError(), "oom"),
        (ZeroDivisionError("division by zero"), "failed"),
    ],
)
def test_failures_become_a_status(tiny_spec, monkeypatch, error, status):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(trial_module, "measure", fail)
    run = trial(tiny_spec())
    assert (run.status, bool(run.reason)) == (status, True)
    assert is_out_of_memory(error) == (status == "oom")


def test_a_loss_that_is_not_finite_is_noted(tiny_spec, monkeypatch):
    from steplab.workloads.gpt.workload import GPTWorkload
    from steplab.workloads.workload import StepOutput

    original = GPTWorkload.loss
    monkeypatch.setattr(
        GPTWorkload, "loss", lambda *a: StepOutput(original(*a).loss * float("nan"))
    )
    run = trial(tiny_spec())
    assert run.status == "ok" and any("not finite" in note for note in run.notes)


def test_sparse_peak_warns_and_training_goes_on(tiny_spec):
    run = trial(tiny_spec("precision=bf16", peak_tflops=1979.0))
    assert run.status == "ok" and run.figures.peak_tflops == 989.4
    assert any("sparse" in note for note in run.notes)


def test_above_100_percent_is_marked(tiny_spec):
    run = trial(tiny_spec(peak_tflops=1e-6))
    assert run.status == "ok" and any("measurement error" in note for note in run.notes)


@pytest.mark.parametrize("fails", [False, True])
def test_the_clean_up_frees_the_model(tiny_spec, monkeypatch, fails):
    """The next trial of the same worker starts with an empty device."""
    models, alive = [], []

    def afterwards(subject, run):
        models.append(weakref.ref(subject.step.model))
        if fails:
            raise RuntimeError("no")
        return run

    def check() -> None:
        gc.collect()
        alive.append(models[0]() is not None)

    monkeypatch.setattr(trial_module, "clean_up", check)
    run = trial(tiny_spec(steps=1), afterwards=afterwards)
    assert run.status == ("failed" if fails else "ok") and alive == [False]


@pytest.mark.gpu
def test_gpu_run_has_device_times_and_launches(tiny_spec):
    run = trial(tiny_spec("precision=bf16", device="cuda", steps=5))
    assert run.status == "ok", run.reason
    assert run.clock.source == "cuda events" and run.clock.agreement == pytest.approx(1, abs=0.05)
    assert run.ran.kernel_launches > 50 and run.ran.kernels
    assert set(run.memory.phase_peaks) == {"forward", "backward", "clip", "optimizer"}
    assert run.memory.source == "cuda allocator" and run.memory.reserved >= run.memory.peak


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["flash", "cudnn", "efficient", "math"])
def test_gpu_attention_backend_is_what_was_asked(tiny_spec, impl):
    recipe = f"precision=bf16,impl.attention={impl}"
    run = trial(tiny_spec(recipe, device="cuda", config={"width": 128}))
    assert run.status == "ok", run.reason


@pytest.mark.gpu
def test_gpu_out_of_memory_is_a_status(tiny_spec):
    torch.cuda.set_per_process_memory_fraction(0.001)
    try:
        run = trial(tiny_spec(device="cuda", batch=4096, config={"width": 512, "context": 512}))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert run.status == "oom"


@pytest.mark.gpu
def test_gpu_compiled_blocks(tiny_spec):
    run = trial(tiny_spec("precision=bf16,compile=blocks", device="cuda", config={"width": 128}))
    assert run.status == "ok", run.reason
    assert run.compilation.graphs == 1 and run.compilation.graphs_in_window == 0


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["blocks", "whole"])
def test_gpu_cuda_graphs_are_replayed(tiny_spec, scope):
    recipe = f"precision=bf16,compile={scope},compile.mode=reduce-overhead"
    run = trial(tiny_spec(recipe, device="cuda", steps=5, config={"width": 128}))
    assert run.status == "ok", run.reason
    assert run.ran.graph_launches > 0 and run.compilation.cudagraph_skips == 0


@pytest.mark.gpu
def test_gpu_step_does_not_wait_for_the_host(tiny_spec):
    """Forward, backward, clipping and a fused update under CUDA's sync debug mode."""
    spec = tiny_spec("precision=bf16,optimizer=fused", device="cuda", config={"width": 128})
    run_without_syncs(spec)


def test_host_memory_is_told_in_units():
    said = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
    )
    assert is_out_of_memory(RuntimeError(said))
    assert memory_sentence(RuntimeError(said)) == "no host memory for another 2.00 GiB"


def test_a_failure_names_the_line_of_the_model(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import torch, steplab\n"
        "def make():\n"
        "    def batches(size):\n"
        "        while True: yield torch.randn(size, 5)\n"
        "    def loss(model, x):\n"
        "        return model(x).mean()\n"
        "    return steplab.UserModel(torch.nn.Linear(4, 1), batches, loss)\n"
    )
    run = trial(RunSpec(named(f"{path}:make"), batch=2, steps=1, warmup=0))
    assert run.status == "failed" and "own.py:6 (loss)" in run.reason

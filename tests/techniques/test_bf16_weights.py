"""bf16 weights with fp32 ones behind them: in a step, in checkpoints, in every workload."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steplab.core import Environment, Ran, Run, RunSpec, TrainSettings, TrainSpec
from steplab.core.errors import UserError
from steplab.modules.optimizer import MASTER, OnePassAdamW
from steplab.step.assemble import assemble, micro_batches
from steplab.step.trial import trial
from steplab.techniques.recipes import parse_recipe, technique
from steplab.train.checkpoint import load_weights
from steplab.train.checkpoint_files import newest_checkpoint
from steplab.train.log import TrainingLog
from steplab.train.loop import Trainer, train
from steplab.train.stop import Stop
from steplab.workloads.workload import find_workload
from tests.own_models import named
from tests.step.syncs import run_without_syncs

BF16 = torch.bfloat16
RECIPE = "precision=bf16-weights,optimizer=one-pass"
SHAPES = {
    "tsmoe": {
        "hidden_size": 32, "n_decoder_layers": 2, "n_head": 2, "num_experts": 4, "d_ff": 32,
        "d_expert": 16, "seq_max_len": 72, "patch_length": 1,
    },
    "gpt": {"width": 32, "ff_width": 64, "layers": 2, "heads": 2, "context": 16, "vocab_size": 64},
}  # fmt: skip


def spec_of(recipe=RECIPE, workload="tsmoe", config=None, **changes):
    resolved = find_workload(workload).resolve("tiny", SHAPES[workload] | (config or {}))
    fields = {"batch": 2, "steps": 2, "warmup": 1, **changes}
    return RunSpec(workload, resolved, "tiny", recipe=parse_recipe(recipe), **fields)


def losses(spec, count=5):
    step = assemble(spec)
    feed = micro_batches(step, spec)
    return step, [float(step(next(feed)).loss) for _ in range(count)]


def test_all_parameters_are_narrow_and_their_weights_are_the_first_ones():
    """Rounded once: the weights behind them are those of the plain model, bit for bit."""
    step, plain = assemble(spec_of()), assemble(spec_of("plain"))
    assert isinstance(step.optimizer, OnePassAdamW)
    for p, original in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert p.dtype == BF16 and torch.equal(p, original.to(BF16))
        assert torch.equal(step.optimizer.state[p][MASTER], original)
    assert all(b.dtype != BF16 for b in step.model.buffers()), "tables of angles keep their digits"


NORMED = """
import torch, steplab
from torch import nn

def make():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    def batches(size):
        return (torch.randn(size, 8) for _ in range(99))
    return steplab.UserModel(model, batches, lambda model, x: model(x).float().square().mean())
"""


def test_batch_norm_keeps_its_parameters(tmp_path):
    """Its op takes them only in the dtype of the running statistics; its output stays narrow."""
    (tmp_path / "own.py").write_text(NORMED)
    spec = RunSpec(named(f"{tmp_path / 'own.py'}:make"), {}, batch=4, recipe=parse_recipe(RECIPE))
    step, found = losses(spec)
    dtypes = [p.dtype for p in step.model.parameters()]
    assert dtypes == [torch.float32] * 2 + [BF16] * 2 + [torch.float32] * 2 + [BF16] * 2
    assert found == pytest.approx(losses(replace(spec, recipe=parse_recipe("plain")))[1], rel=0.05)


@pytest.mark.parametrize(
    ("workload", "config"),
    [("tsmoe", {}), ("tsmoe", {"layout": "time-moe", "quantiles": "0.1,0.9"}), ("gpt", {})],
)
def test_every_workload_runs_and_starts_as_in_fp32(workload, config):
    _, narrow = losses(spec_of(RECIPE, workload, config))
    _, full = losses(spec_of("plain", workload, config))
    assert narrow == pytest.approx(full, rel=2e-3)
    run = trial(spec_of(RECIPE, workload, config))
    assert run.status == "ok", run.reason
    assert run.ran.optimizer == "one-pass reference"
    assert run.ran.matmul_dtypes["c10::BFloat16"] > 2 * run.ran.matmul_dtypes.get("float", 0)


def test_losses_and_metrics_are_fp32():
    step = assemble(spec_of())
    output = step(next(micro_batches(step, spec_of())))
    assert output.loss.dtype == torch.float32
    assert {m.dtype for m in output.metrics.values()} == {torch.float32}


OWN = """
import torch, steplab
from torch import nn
from torch.nn import functional as F

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50)

    def forward(self, x):
        logits = self.head(self.norm(self.embedding(x[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())

def make():
    def batches(size):
        while True:
            yield torch.randint(0, 50, (size, 9))
    return steplab.UserModel(Language(), batches, lambda model, x: model(x))
"""


def test_the_loss_of_a_users_model_is_computed_in_fp32(tmp_path):
    """As by autocast: in bf16 it would move in steps of a hundredth."""
    (tmp_path / "own.py").write_text(OWN)
    name = named(f"{tmp_path / 'own.py'}:make")
    _, found = losses(RunSpec(name, {}, batch=2, recipe=parse_recipe(RECIPE)))
    assert any(loss != float(torch.tensor(loss).bfloat16()) for loss in found)
    _, plain = losses(RunSpec(name, {}, batch=2))
    assert found == pytest.approx(plain, rel=1e-3)


def test_points_enter_with_all_their_digits():
    """1000 and 1001 are one number in bf16; the embedding must tell them apart."""
    model = assemble(spec_of()).model
    a, b = model.embedding(torch.tensor([[[1000.0]], [[1001.0]]]))
    assert a.dtype == BF16 and not torch.equal(a, b)


def test_the_stream_is_narrow_throughout():
    step, seen = assemble(spec_of()), set()

    def note(module, inputs, out):
        seen.update(t.dtype for t in (*inputs, *out))

    for module in step.model.modules():
        if getattr(module, "op", "") == "rms_norm":
            module.register_forward_hook(note)
    step(next(micro_batches(step, spec_of())))
    assert seen == {BF16}


@pytest.mark.parametrize("scope", ["blocks", "whole"])
def test_compiled_it_computes_the_same(scope):
    _, eager = losses(spec_of(), 3)
    _, compiled = losses(spec_of(f"{RECIPE},compile={scope},compile.backend=aot_eager"), 3)
    assert compiled == pytest.approx(eager, rel=1e-4)


def test_inference_needs_no_optimizer():
    run = trial(spec_of("precision=bf16-weights", mode="infer"))
    assert run.status == "ok", run.reason


@pytest.mark.parametrize("recipe", ["precision=bf16-weights", f"{RECIPE[:22]},optimizer=fused"])
def test_without_master_weights_it_is_refused(recipe):
    with pytest.raises(UserError, match="optimizer=one-pass"):
        assemble(spec_of(recipe))


def test_a_kernel_is_not_compiled_again():
    with pytest.raises(UserError, match="nothing to do"):
        parse_recipe("optimizer=one-pass,compile=blocks,compile.optimizer=true")


def test_what_ran_is_compared_with_what_was_asked():
    def seen(**ran):
        environment = Environment("0", "3.11", "Linux", "cpu", 2, None)
        return Run("id", RunSpec("gpt"), environment, ran=Ran(**ran))

    precision, optimizer = technique("precision"), technique("optimizer")
    bf16, fp32 = seen(matmul_dtypes={"c10::BFloat16": 9}), seen(matmul_dtypes={"float": 9})
    assert not precision.mismatch({"dtype": "bf16-weights"}, bf16)
    assert "was asked for" in precision.mismatch({"dtype": "bf16-weights"}, fp32)
    one_pass = {"impl": "one-pass"}
    assert not optimizer.mismatch(one_pass, seen(optimizer="one-pass triton_update"))
    assert "was asked for" in optimizer.mismatch(one_pass, seen(optimizer="fused"))


@pytest.mark.parametrize("clip", [0.0, 1e-3, 1.0])
def test_the_step_clips_as_it_does_with_torch(clip):
    one_pass, first = losses(spec_of("optimizer=one-pass", clip=clip))
    plain, second = losses(spec_of("plain", clip=clip))
    assert first == pytest.approx(second, rel=1e-6)
    for p, q in zip(one_pass.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def training(folder, recipe=RECIPE, **settings):
    config = {**SHAPES["tsmoe"], "hidden_size": 16, "seq_max_len": 40, "horizons": "1,8"}
    chosen = {
        "steps_per_epoch": 4, "batch_size": 4, "validate_every": 0, "validation_batches": 1,
        "checkpoint_every": 4, "checkpoint_dir": str(folder), "log_every": 4,
    }  # fmt: skip
    resolved = find_workload("tsmoe").resolve("tiny", config)
    how = TrainSettings(**chosen | settings)
    return TrainSpec("tsmoe", resolved, "tiny", parse_recipe(recipe), "cpu", how)


def silent():
    return TrainingLog(lambda line: None, None, perf=False)


def test_checkpoints_hold_the_fp32_weights_once(tmp_path):
    from safetensors.torch import load_file

    spec = training(tmp_path)
    train(spec, silent(), Stop())
    saved = load_file(newest_checkpoint(tmp_path) / "model.safetensors")
    moments = load_file(newest_checkpoint(tmp_path) / "optimizer.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.float32}
    assert not torch.equal(saved["heads.weight"], saved["heads.weight"].to(BF16).float())
    assert {name.partition("/")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}
    model = find_workload("tsmoe").open(spec.config).model()
    load_weights(newest_checkpoint(tmp_path), model)
    assert torch.equal(model.heads.weight, saved["heads.weight"])


def test_a_new_run_starts_from_all_digits_of_old_weights(tmp_path):
    train(training(tmp_path / "old", "plain"), silent(), Stop())
    origin = newest_checkpoint(tmp_path / "old")
    spec = training(tmp_path / "new", from_checkpoint=str(origin))
    session = Trainer(spec, silent())
    session.start_from(Path(origin))
    model = find_workload("tsmoe").open(spec.config).model()
    load_weights(origin, model)
    state = session.step.optimizer.state
    for p, original in zip(session.step.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(state[p][MASTER], original) and torch.equal(p, original.to(BF16))


def test_a_checkpoint_of_torchs_optimizer_is_refused_as_a_whole(tmp_path):
    train(training(tmp_path, "plain"), silent(), Stop())
    session = Trainer(replace(training(tmp_path), device="cpu"), silent())
    before = [p.detach().clone() for p in session.step.model.parameters()]
    with pytest.raises(UserError, match="state of AdamW"):
        session.resume(newest_checkpoint(tmp_path))
    for p, was in zip(session.step.model.parameters(), before, strict=True):
        assert p.dtype == BF16 and torch.equal(p, was)


@pytest.mark.gpu
def test_gpu_step_runs_without_host_syncs():
    step, output = run_without_syncs(spec_of(device="cuda"))
    assert torch.isfinite(output.loss) and step.optimizer.ran == "triton_update"
    assert {m.ran for m in step.model.modules() if getattr(m, "op", "") == "rms_norm"} == {
        "triton_norm"
    }


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["", ",compile=blocks", ",compile=whole"])
def test_gpu_trains_as_the_cpu_does(scope):
    on_cpu, on_gpu = assemble(spec_of()), assemble(spec_of(f"{RECIPE}{scope}", device="cuda"))
    with on_gpu.optimizer.full_weights(), on_cpu.optimizer.full_weights():
        on_gpu.model.load_state_dict(on_cpu.model.state_dict())
    feeds = micro_batches(on_cpu, spec_of()), micro_batches(on_gpu, spec_of(device="cuda"))
    for _ in range(3):
        here, there = (s(next(f)).loss.item() for s, f in zip((on_cpu, on_gpu), feeds, strict=True))
        assert there == pytest.approx(here, rel=5e-3)

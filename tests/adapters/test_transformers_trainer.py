"""The mixin against Hugging Face's Trainer itself."""

import re
from pathlib import Path

import pytest
import torch

reason = "transformers and accelerate are optional extras, steplab[hf,accelerate]"
transformers = pytest.importorskip("transformers", reason=reason)
pytest.importorskip("accelerate", reason=reason)

from steplab.adapters.transformers_trainer import MeterCallback, RecipeMixin
from steplab.core.errors import UserError
from steplab.probes import disturbances
from steplab.probes.compilation import graph_count

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


class Tuned(RecipeMixin, transformers.Trainer):
    pass


def llama():
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=31,
    )
    return transformers.LlamaForCausalLM(config)


def texts():
    rows = torch.randint(31, (24, 9), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def make_trainer(kind, folder, recipe="plain", make_model=llama, data=None, **options):
    torch.manual_seed(0)
    model, data = make_model(), data or texts()
    callbacks = options.pop("callbacks", [])
    settings = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    args = transformers.TrainingArguments(str(folder), **settings)
    kind.recipe = recipe
    return kind(model, args, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def trained(trainer):
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    [("plain", 0.0), ("optimizer=foreach", 1e-6), ("compile=loss,compile.backend=eager", 1e-6)],
)
def test_the_trainer_trains_the_same(tmp_path, recipe, tolerance):
    """Accumulation, `num_items_in_batch`, the schedule and clipping stay the Trainer's."""
    expected, weights = trained(make_trainer(transformers.Trainer, tmp_path))
    tuned = make_trainer(Tuned, tmp_path, recipe)
    losses, found = trained(tuned)
    assert losses == pytest.approx(expected, rel=tolerance)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=tolerance * 100, atol=tolerance)
    assert (tuned.step.optimizer is None) == ("optimizer" not in recipe)
    assert tuned.evaluate()["eval_loss"] > 0


def test_the_lines_for_the_trainer_do_what_they_replace(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "own_loop.md").read_text()
    section = page.split("## In the Trainer, Lightning or Accelerate")[1].split("\n## ")[0]
    losses = []
    for lines in re.findall(r"^```python\n(.*?)^```", section, re.M | re.S):
        quick = "max_steps=3, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True"
        lines = lines.replace("max_steps=1000", quick).replace("checkpoints", str(tmp_path))
        torch.manual_seed(0)
        names = {"model": llama(), "data": texts()}
        exec(lines.replace("recipe.toml", "precision=bf16"), names)
        losses.append([e["loss"] for e in names["trainer"].state.log_history if "loss" in e])
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_every_step_of_the_trainer_runs_compiled_code(tmp_path):
    """Also where the number of tokens differs from batch to batch."""
    tuned = make_trainer(Tuned, tmp_path, "compile=loss,compile.backend=eager", max_steps=6)
    for row in tuned.train_dataset[::3]:
        row["labels"] = row["labels"].clone()
        row["labels"][:4] = -100
    torch._dynamo.reset()
    events, graphs = len(disturbances._notes), graph_count()
    trained(tuned)
    assert disturbances._notes[events:] == [] and graph_count() - graphs == 1


def test_autocast_of_the_recipe_reaches_the_model(tmp_path):
    seen = []
    tuned = make_trainer(Tuned, tmp_path, "precision=bf16")
    tuned.model.lm_head.register_forward_hook(lambda m, x, y: seen.append(y.dtype))
    losses, _ = trained(tuned)
    assert seen[0] == torch.bfloat16 and len(losses) == 3
    assert {p.dtype for p in tuned.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("cuda_graph=step", {}, r"captures backward and update too, which the Trainer calls"),
        ("prefetch=2", {}, "the loader belongs to the Trainer"),
        ("precision=fp16", {}, "scales gradients, which the Trainer does by itself"),
        ("precision=bf16", {"bf16": True}, "precision, and bf16 or fp16 is set too"),
    ],
)
def test_what_a_trainer_cannot_have_is_refused_before_training(tmp_path, recipe, options, said):
    tuned = make_trainer(Tuned, tmp_path, recipe, **options)
    with pytest.raises(UserError, match=said):
        tuned.train()
    assert tuned.state.global_step == 0


def test_a_loss_of_the_users_own_is_kept(tmp_path):
    class Halved(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss / 2

    class TunedHalf(RecipeMixin, Halved):
        pass

    expected, _ = trained(make_trainer(Halved, tmp_path))
    losses, _ = trained(make_trainer(TunedHalf, tmp_path))
    assert losses == pytest.approx(expected)


def test_the_meter_tells_where_the_trainer_logs(tmp_path, capsys):
    callback = MeterCallback(tokens_per_step=36, inspect_step=None)
    tuned = make_trainer(transformers.Trainer, tmp_path, callbacks=[callback])
    trained(tuned)
    rates = [entry for entry in tuned.state.log_history if "train/toks_per_sec" in entry]
    assert rates and all(entry["train/toks_per_sec"] > 0 for entry in rates), rates
    assert capsys.readouterr().out.count("tok/s") >= 3


def test_an_evaluation_is_no_data_stall(tmp_path):
    callback = MeterCallback(tokens_per_step=36, inspect_step=None)
    options = {"eval_strategy": "steps", "eval_steps": 2, "callbacks": [callback]}
    trained(make_trainer(transformers.Trainer, tmp_path, **options))
    # Of the first step, and of the one after an evaluation, the wait is none of the loader's.
    assert list(callback.meter.summary().data_wait.marks) == ["0", "2"]


class Pixels(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(9, 31)

    def forward(self, pixels=None, labels=None):
        logits = self.head(pixels)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_float_inputs_are_evaluated_where_weights_are_rounded(tmp_path):
    rows = torch.randn(24, 9, generator=torch.Generator().manual_seed(1))
    data = [{"pixels": row, "labels": torch.tensor(i)} for i, row in enumerate(rows)]
    recipe = "precision=bf16-weights,optimizer=one-pass"
    tuned = make_trainer(Tuned, tmp_path, recipe, Pixels, data)
    trained(tuned)
    found = tuned.predict(data)
    with torch.autocast("cpu", torch.bfloat16):
        expected = tuned.model(rows, torch.arange(24))
    assert torch.equal(torch.from_numpy(found.predictions), expected["logits"].float())
    assert found.metrics["test_loss"] == pytest.approx(expected["loss"].item(), rel=1e-6)


def test_training_goes_on_from_a_checkpoint_of_the_trainer(tmp_path):
    recipe = "precision=bf16-weights,optimizer=one-pass"
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    _, expected = trained(make_trainer(Tuned, tmp_path / "whole", recipe, **options))
    again = make_trainer(Tuned, tmp_path / "resumed", recipe, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert again.state.global_step == 4
    for name, weight in again.model.named_parameters():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, expected[name]), name
    with again.step.full_weights():
        assert {p.dtype for p in again.model.parameters()} == {torch.float32}

"""The folder of lies as a table: what is wrong, in which model, and which tensor shows it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from steplab.core import PLAIN, Mode, Recipe, RunSpec
from steplab.step.assemble import assemble
from steplab.techniques.recipes import parse_recipe
from steplab.verify.draws import check_draws, take_draws
from steplab.verify.judge import judge
from steplab.verify.numerics import NumericsSnapshot
from steplab.verify.references import compute_reference, snapshot_without_dropout
from steplab.verify.shapes import GateShape, references_of
from tests.own_models import named
from tests.verify.planted import PLANTED

HERE = Path(__file__).parent
WRONG = "wrong_models"
BF16_WEIGHTS = "precision=bf16-weights,optimizer=one-pass"
DRAWING = (
    *("dropout", "functional_dropout", "noise", "much_noise", "sampled", "filled_noise"),
    "dropped_paths",
)


@dataclass(frozen=True)
class Case:
    """A model of this folder at one seed."""

    model: str
    file: str = "honest_models"
    accumulate: int = 1
    seed: int = 0
    mode: Mode = "full"

    def spec(self, recipe: Recipe = PLAIN) -> RunSpec:
        name = named(f"{HERE / self.file}.py:{self.model}")
        how = {"batch": 8, "accumulate": self.accumulate, "seed": self.seed, "mode": self.mode}
        return RunSpec(name, {}, recipe=recipe, **how)

    def red(self, recipe: Recipe) -> dict[str, str]:
        """Hold a recipe against the truth; return group -> detail of every red check."""
        spec = self.spec(recipe)
        found = snapshot_without_dropout(spec)
        names = references_of(found.rounding)
        checks = [*judge(found, [reference(self, n) for n in names], reference(self, "fp64"), "")]
        if self.model in DRAWING:
            checks.append(check_draws(take_draws(assemble(spec), spec), reference(self, "draws")))
        return {check.name: check.detail for check in checks if not check.passed}


@cache
def reference(case: Case, name: str) -> NumericsSnapshot:
    """Return what the plain step computes; several recipes are compared with it."""
    return compute_reference(GateShape("own", "", case.spec()), name)


@dataclass(frozen=True)
class Lie:
    """A wrong step; `group` and `tensor` are what a red check must name."""

    name: str  # of a technique; "": the model is wrong when it runs in bf16
    case: Case
    group: str
    tensor: str

    @property
    def recipe(self) -> Recipe:
        return PLANTED if self.name else parse_recipe("precision=bf16")

    def __str__(self) -> str:
        return f"{self.name or 'bf16'}-{self.case.model}"


def technique(name: str, model: str, group: str, tensor: str, **case) -> Lie:
    return Lie(name, Case(model, **case), group, tensor)


def model(name: str, group: str, tensor: str) -> Lie:
    return Lie("", Case(name, WRONG), group, tensor)


LIES = [
    technique("statistics_twice", "batchnorm_blocks", "buffers", "num_batches_tracked"),
    technique("statistics_frozen", "batchnorm_convnet", "buffers", "norms.0.running_mean"),
    technique("average_not_kept", "buffers", "buffers", "seen"),
    technique("unseen_as_zero", "unseen", "NaN in buffers", "best"),
    technique("forgets_momentum", "plain_mlp", "optimizer momentum_buffer", "weight"),
    technique("rounded_moments", "tied_weights", "optimizer exp_avg_sq", "blocks"),
    technique("decay_left_out", "tied_weights", "update", "norm.weight"),
    technique("count_off_by_one", "two_losses", "optimizer step", "trunk.0.weight"),
    technique("not_clipped", "summed_loss", "optimizer exp_avg", "worst"),
    technique("clipped_one_by_one", "summed_loss", "optimizer exp_avg", "bias"),
    technique("rounded_gradients", "plain_mlp", "gradients", "weight"),
    technique("idle_rows_stay", "padded", "update", "embedding.weight"),
    technique("stale_copy", "two_losses", "loss", "step"),
    technique("dropout_thrice", "dropout", "random draws", "weight"),
    technique("dropout_left_out", "dropout", "random draws", "weight"),
    technique("one_mask_forever", "dropout", "random draws", "weight"),
    technique("noise_forever", "noise", "random draws", "weight"),
    technique("other_rate", "dropout", "random draws", "weight"),
    technique("rows_share_a_mask", "dropout", "random draws", "blocks.0"),
    technique("other_mask_in_backward", "dropout", "random draws", "blocks.0"),
    technique("every_mask_twice", "dropout", "random draws", "drawn before"),
    technique("every_step_the_same", "dropout", "random draws", "drawn before"),
    technique("seeded_after_steps", "dropout", "random draws", "drawn before"),
    technique("dropout_unscaled", "dropout", "random draws", "weight"),
    technique("untied", "tied_weights", "weights", "head.weight"),
    technique("other_gelu", "plain_mlp", "outputs", "prediction 0"),
    technique("other_epsilon", "contrastive", "gradients", "norm.bias"),
    technique("truncated_experts", "moe_with_ties", "gradients", "experts"),
    technique("wrong_every_fifth_time", "two_losses", "update", "trunk.0"),
    technique("first_result_forever", "plain_mlp", "outputs", "prediction 0 in step", mode="infer"),
    technique("other_ids", "token_ids", "choices", "prediction 0", mode="infer"),
    technique("first_result_forever", "token_ids", "choices", "prediction 0", mode="infer"),
    technique("frozen_metrics", "counted", "outputs", "accuracy"),
    technique("frozen_metrics", "hits", "outputs", "right"),
    technique("scaled_logits", "padded", "outputs", "prediction 0"),
    technique("scaled_logits", "filled_noise", "outputs", "prediction 0"),
    technique("other_gelu", "filled_noise", "gradients", "net.0"),
    technique("bf16_loss", "tied_weights", "loss", "step"),
    technique("lost_row", "tied_weights", "gradients", "embedding.weight"),
    technique("weights_lost_in_bf16", "tied_weights", "update", "norm.weight"),
    technique("wrong_when_compiled", "batchnorm_blocks", "gradients", "blocks.0.linear"),
    technique("blocks_compiled", "other_when_compiled", "outputs", "prediction 0", file=WRONG),
    technique("last_micro_batch_only", "plain_mlp", "gradients", "in step", accumulate=2),
    technique("other_threshold", "relu_convnet", "outputs", "prediction 0"),
    technique("lost_bias", "relu_convnet", "gradients", "convs.1.bias"),
    model("loss_scaled", "loss", "step"),
    model("loss_summed_in_bf16", "loss", "step"),
    model("loss_read_in_bf16", "loss", "step"),
    model("attention_scale", "gradients", "blocks."),
    model("attention_without_mask", "gradients", "blocks"),
    model("backward_of_a_product", "gradients", "weight"),
    model("variance_of_a_norm", "gradients", "linear"),
    model("lost_tail", "outputs", "prediction 0"),
    model("lost_residual", "outputs", "prediction 0"),
    model("stuck_buffer", "buffers", "mean"),
    model("forgotten_expert", "optimizer exp_avg", "experts.3"),
    model("coarse_logits", "outputs", "prediction 0"),
]

HONEST = [
    "relu_convnet",
    "batchnorm_convnet",
    "batchnorm_blocks",
    "dropout",
    "functional_dropout",
    "noise",
    "tied_weights",
    "buffers",
    "two_losses",
    "moe_with_ties",
    "recurrent",
    "contrastive",
    "summed_loss",
    "padded",
    "plain_mlp",
    "counted",
    "sampled",
    "skipped_layers",
    "complex_buffers",
    "fp32_mask",
    "reparametrized",
    "teacher_and_queue",
    "gradient_penalty",
    "dropped_paths",
    "post_norm",
    "much_noise",
    "token_ids",
    "hits",
    "unseen",
    "filled_noise",
]
BLOCKS = [
    *("batchnorm_blocks", "dropout", "functional_dropout", "tied_weights", "moe_with_ties"),
    "skipped_layers",
]
NARROW = [
    *("relu_convnet", "batchnorm_blocks", "dropout", "tied_weights", "two_losses"),
    *("moe_with_ties", "contrastive", "counted", "sampled", "skipped_layers"),
    *("complex_buffers", "teacher_and_queue", "gradient_penalty", "dropped_paths"),
    *("post_norm", "much_noise", "unseen", "filled_noise"),
]
RECIPES = [
    *((name, word) for word in ("precision=bf16", "optimizer=foreach") for name in HONEST),
    *((name, "checkpointing=blocks") for name in BLOCKS),
    *((name, BF16_WEIGHTS) for name in NARROW),
]

"""The callbacks against Lightning itself."""

import pytest
import torch

lightning = pytest.importorskip("lightning", reason="an optional extra, steplab[lightning]")

from lightning.pytorch import LightningModule, Trainer

from steplab.adapters.lightning_module import MeterCallback, RecipeCallback
from steplab.core.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.losses, self.dtypes = [], []

    def training_step(self, batch, batch_idx):
        x = batch
        for layer in self.layers:
            x = layer(x).tanh()
        self.dtypes.append(x.dtype)
        loss = (x.float() - batch).square().mean()
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)]


def fit(module, *callbacks, **options):
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
    return trainer, module


@pytest.mark.parametrize("recipe", ["plain", "optimizer=foreach", "checkpointing=blocks"])
def test_the_module_trains_the_same(recipe):
    _, expected = fit(Net())
    _, found = fit(Net(), RecipeCallback(recipe))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_schedules_stay_where_the_recipe_leaves_the_optimizer_alone():
    _, expected = fit(Scheduled())
    trainer, found = fit(Scheduled(), RecipeCallback("precision=bf16"))
    assert found.dtypes[0] == torch.bfloat16 and expected.dtypes[0] == torch.float32
    assert trainer.optimizers[0].param_groups[0]["lr"] < 1e-2
    with pytest.raises(UserError, match=r"returns a tuple, whose schedules belong"):
        fit(Scheduled(), RecipeCallback("optimizer=foreach"))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("cuda_graph=step", "which Lightning calls by itself"),
        ("compile=whole", "is no one graph. Use compile=blocks"),
        ("precision=fp16", "which Lightning does by itself"),
    ],
)
def test_what_lightning_cannot_have_is_refused(recipe, said):
    with pytest.raises(UserError, match=said):
        RecipeCallback(recipe)


class Telling(Net):
    """Returns more than a loss, and nothing for the third batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else {"loss": loss, "rows": len(batch)}


class Outputs(lightning.pytorch.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append({**outputs, "loss": float(outputs["loss"])} if outputs else outputs)


def test_what_training_step_returns_beside_the_loss_reaches_the_callbacks():
    expected, found = Outputs(), Outputs()
    fit(Telling(), expected)
    fit(Telling(), RecipeCallback("optimizer=foreach"), found)
    assert found.seen[0]["rows"] == 4 and not found.seen[2]
    assert [s.get("rows") for s in found.seen] == [s.get("rows") for s in expected.seen]
    assert [s.get("loss") for s in found.seen] == pytest.approx(
        [s.get("loss") for s in expected.seen]
    )


def test_a_recipe_is_not_put_into_a_module_twice():
    callback = RecipeCallback("precision=bf16")
    _, module = fit(Net(), callback)
    for second in (callback, RecipeCallback("plain")):
        with pytest.raises(UserError, match="has been fitted with a recipe before"):
            fit(module, second)


class Validated(Net):
    def validation_step(self, batch, batch_idx):
        pass

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=4)

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 else None  # the rest of the epoch is skipped


def test_neither_validation_nor_a_skipped_batch_disturbs_the_meter():
    callback = MeterCallback(tokens=torch.numel, inspect_step=None)
    fit(Validated(), callback, val_check_interval=2, max_epochs=2)
    waits = callback.meter.summary().data_wait
    assert len(waits.values) == 8
    # Of the first step, and of those after a validation, the wait is none of the loader's.
    assert list(waits.marks) == ["0", "2", "4", "6"]


class Judged(Net):
    """Its validation calls layers by name, as its training does."""

    def validation_step(self, batch, batch_idx):
        self.judged = self.layers[0](batch)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=4)


def test_validation_computes_as_training_where_weights_are_rounded():
    _, module = fit(Judged(), RecipeCallback("precision=bf16-weights,optimizer=one-pass"))
    assert module.judged.dtype == torch.bfloat16
    _, unvalidated = fit(Net(), RecipeCallback("precision=bf16-weights,optimizer=one-pass"))
    assert module.losses == unvalidated.losses


def test_precision_is_decided_once():
    with pytest.raises(UserError, match=r"has precision, and precision=bf16-mixed is set too"):
        fit(Net(), RecipeCallback("precision=bf16"), precision="bf16-mixed")


def test_the_meter_logs():
    callback = MeterCallback(tokens=lambda batch: batch.numel(), every=2, inspect_step=None)
    trainer, _ = fit(Net(), callback)
    assert trainer.logged_metrics["train/toks_per_sec"] > 0

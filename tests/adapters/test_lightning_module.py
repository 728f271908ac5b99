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
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        **options,
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


def test_precision_is_decided_once():
    with pytest.raises(UserError, match=r"has precision, and precision=bf16-mixed is set too"):
        fit(Net(), RecipeCallback("precision=bf16"), precision="bf16-mixed")


def test_the_meter_logs():
    callback = MeterCallback(tokens=lambda batch: batch.numel(), every=2, inspect_step=None)
    trainer, _ = fit(Net(), callback)
    assert trainer.logged_metrics["train/toks_per_sec"] > 0

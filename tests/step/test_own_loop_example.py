"""The loop of examples/own_loop.py: by hand, and with a recipe."""

import copy
import importlib.util
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steplab

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.STEPS, module.EVALUATE_EVERY, module.BATCH = 6, 3, 2
    return module


@pytest.fixture(scope="module")
def by_hand(example, tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp("by_hand") / "own_loop.pt"
    return example.train("cpu", checkpoint), torch.load(checkpoint, weights_only=True)


def test_the_plain_recipe_is_the_loop_by_hand(example, by_hand, tmp_path, capsys):
    losses = example.train_tuned("cpu", tmp_path / "own_loop.pt", "plain")
    assert losses == by_hand[0]
    assert capsys.readouterr().out.count("held out") == 2
    saved = torch.load(tmp_path / "own_loop.pt", weights_only=True)
    for name, expected in by_hand[1]["model"].items():
        assert torch.equal(saved["model"][name], expected)
    assert saved["adamw"]["param_groups"] == by_hand[1]["adamw"]["param_groups"]


def test_a_recipe_with_everything_that_a_cpu_has_stays_near(example, by_hand, tmp_path):
    recipe = "precision=bf16,compile=blocks,compile.backend=eager,optimizer=foreach,prefetch=2"
    losses = example.train_tuned("cpu", tmp_path / "own_loop.pt", recipe)
    # bf16 has 8 bits: a loss near 5 is off by some of its roundings, 5 / 2**8 each.
    assert losses == pytest.approx(by_hand[0], abs=3 * 5 / 2**8)
    saved = torch.load(tmp_path / "own_loop.pt", weights_only=True)
    assert list(saved["model"]) == list(by_hand[1]["model"])


class SmallGPT(nn.Module):
    """What nanoGPT's train.py asks of its model."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(17, 8), nn.Linear(8, 17, bias=False)

    def forward(self, idx, targets=None):
        logits = self.head(self.words(idx))
        return logits, F.cross_entropy(logits.view(-1, 17), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        assert device_type == "cpu"
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)


def test_the_lines_for_nanogpt_do_what_they_replace():
    page = (ROOT / "docs" / "own_loop.md").read_text()
    section = page.split("## nanoGPT's train.py")[1].split("\n## ")[0]
    prepare, run = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    torch.manual_seed(0)
    data = torch.randint(17, (12, 2, 5))
    numbers = {"weight_decay": 0.1, "learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95}
    names = {**numbers, "grad_clip": 0.5, "gradient_accumulation_steps": 3, "device_type": "cpu"}
    hand, rows, stream = SmallGPT(), iter(data), iter(data)
    names |= {"steplab": steplab, "model": copy.deepcopy(hand)}
    names["get_batch"] = lambda split: ((words := next(stream)), words.roll(-1))
    exec(prepare.replace('"recipe.toml"', '"plain"'), names)
    optimizer = hand.configure_optimizers(0.1, 1e-2, (0.9, 0.95), "cpu")
    for number in range(4):
        for one in (optimizer, names["optimizer"]):
            one.param_groups[0]["lr"] = 1e-2 / (number + 1)
        losses = []
        for words in (next(rows) for _ in range(3)):
            losses.append(hand(words, words.roll(-1))[1])
            (losses[-1] / 3).backward()
        nn.utils.clip_grad_norm_(hand.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        exec(run, names)
        assert names["loss"].item() == pytest.approx(torch.stack(losses).mean().item())
    for mine, theirs in zip(names["model"].parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)

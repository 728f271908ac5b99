"""Training scripts run unedited; what is lifted out of them does what they do."""

import sys
import time

import pytest
import torch

from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.step.assemble import assemble
from steplab.workloads.script.lift import survey
from steplab.workloads.user_model import load_user_model

MLP = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(5, args.width), nn.ReLU(), nn.Linear(args.width, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
dataset = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.randint(3, (64,)))
losses = []
for step, (x, y) in enumerate(torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)):
    optimizer.zero_grad()
    logits = model(x)
    loss = criterion(logits, y)
    loss += 1e-3 * sum(p.square().sum() for p in model.parameters())
    accuracy = (logits.argmax(-1) == y).float().mean().item()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step + 1 == args.steps:
        break
"""

# As nanoGPT does it: config words, accumulation, autocast, GradScaler, compile, an evaluation.
NANO = """
import os
import sys
import numpy as np
import torch
from net import GPT

batch_size, block_size, gradient_accumulation_steps, width = 4, 6, 3, 8
dtype, compile, out_dir, learning_rate, max_iters = "bfloat16", True, "out", 1e-2, 100
for word in sys.argv[1:]:
    key, value = word.removeprefix("--").split("=")
    globals()[key] = int(value) if value.isdigit() else value
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
data = np.random.randint(0, 11, 500).astype(np.uint16)


def get_batch():
    starts = torch.randint(len(data) - block_size, (batch_size,))
    rows = [torch.from_numpy(data[i : i + block_size + 1].astype(np.int64)) for i in starts]
    both = torch.stack(rows)
    return both[:, :-1], both[:, 1:]


model = GPT(11, width)
scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")
groups = [
    {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
raw = model
model = torch.compile(model)
context = torch.amp.autocast("cpu", dtype=getattr(torch, dtype))


@torch.no_grad()
def estimate_loss():
    model.eval()
    x, y = get_batch()
    with context:
        _, loss = model(x, y)
    model.train()
    return loss.item()


x, y = get_batch()
for iteration in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * (iteration + 1) / 10
    if iteration % 2 == 0:
        estimate_loss()
        torch.save(raw.state_dict(), os.path.join(out_dir, "ckpt.pt"))
        with open(os.path.join(out_dir, "log.txt"), "a") as log:
            log.write("evaluated")
    for micro_step in range(gradient_accumulation_steps):
        with context:
            logits, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""
NET = """
import torch.nn.functional as F
from torch import nn


class GPT(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.embed.weight = self.head.weight

    def forward(self, idx, targets=None):
        logits = self.head(self.norm(self.embed(idx)))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
"""


def write(folder, text, name="train.py"):
    (folder / name).write_text(text)
    return f"script:{name}"


def lift(folder, text, arguments=""):
    """Return what the command line learns of a script, and the step that is made of it."""
    entry = load_user_model(write(folder, text))
    config = entry.resolve("", {"arguments": arguments})
    found = survey(RunSpec(entry.name, config, source=entry.source))
    assert not found.refusal, found.refusal
    step = assemble(
        RunSpec(
            entry.name,
            {**config, "start": found.start},
            batch=found.batch,
            accumulate=found.accumulate,
            clip=found.clip,
            source=entry.source,
        )
    )
    return found, step


def refused(folder, text, arguments=""):
    """Return what the command line learns of a script that is refused, or that ends too early."""
    entry = load_user_model(write(folder, text))
    config = entry.resolve("", {"arguments": arguments})
    found = survey(RunSpec(entry.name, config, source=entry.source))
    assert found.refusal.endswith(".")
    return found


def refusal(folder, text, arguments=""):
    """Return why a script is refused; one that does not end by itself gets a start."""
    found = refused(folder, text, arguments)
    assert found.ended == (not found.beginning)
    compile(found.beginning, "my_model.py", "exec")
    return found.refusal


def run_for_real(text, *arguments):
    """Run a script as Python does and return its variables."""
    before, sys.argv = sys.argv, ["train.py", *arguments]
    variables = {"__name__": "__main__"}
    try:
        exec(compile(text, "train.py", "exec"), variables)
    finally:
        sys.argv = before
    return variables


def test_the_lifted_step_makes_the_update_of_the_script(folder):
    """Loss, class weights, a penalty on the weights and momentum: the same first steps."""
    found, step = lift(folder, MLP, "--width 6")
    assert (found.batch, found.accumulate, found.clip, found.recipe) == (8, 1, 0.0, "plain")
    torch.manual_seed(0)
    # The schedule begins at 0, so the lifted step takes the rate that the optimizer was made with.
    own = run_for_real(MLP.replace("step / 10", "1.0"), "--width", "6", "--steps", "3")
    batches = step.workload.batches(8, torch.device("cpu"), 0)
    losses = [step([next(batches)]).loss.item() for _ in range(3)]
    assert losses == pytest.approx(own["losses"], rel=1e-6)
    for mine, theirs in zip(step.model.parameters(), own["model"].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_script_like_nanogpts(folder):
    write(folder, NET, "net.py")
    found, step = lift(folder, NANO, "--width=12")
    assert (found.batch, found.accumulate, found.clip) == (4, 3, 0.5)
    assert set(found.recipe.split(",")) == {"precision=bf16", "compile=whole", "optimizer=fused"}
    assert step.model.embed.weight.shape == (11, 12)
    assert step.workload.tokens(4) == 4 * 6
    rates = [(g["lr"], g["betas"], g["weight_decay"]) for g in step.optimizer.param_groups]
    assert rates == [(1e-2, (0.9, 0.95), 0.1), (1e-2, (0.9, 0.95), 0.0)]
    batches = step.workload.batches(4, torch.device("cpu"), 0)
    micro = [next(batches) for _ in range(3)]
    expected = torch.stack([step.model(*batch)[1] for batch in micro]).mean()
    torch.testing.assert_close(step(micro).loss, expected.detach())
    assert sorted(p.name for p in folder.iterdir() if p.name != "__pycache__") == [
        "net.py",
        "train.py",
    ]


def test_the_loss_of_a_script_runs_in_other_batch_sizes_and_precisions(folder):
    write(folder, NET, "net.py")
    _, step = lift(folder, NANO)
    batch = next(step.workload.batches(2, torch.device("cpu"), 0))
    assert [tensor.shape for tensor in batch] == [(2, 6), (2, 6)]
    step.model.double()
    assert step.workload.loss(step.model, batch).loss.dtype == torch.float64
    with pytest.raises(UserError, match=r"batches of 4, not of 5.* another batch size"):
        next(step.workload.batches(5, torch.device("cpu"), 0))


def test_a_script_that_begins_differently_is_not_compared_with_itself(folder):
    """Its own generator is seeded by nobody, so two workers would train two models."""
    text = MLP.replace(
        "torch.manual_seed(3)",
        "import numpy\nseed = numpy.random.default_rng().integers(2**60)\n"
        "torch.manual_seed(int(seed))",
    )
    with pytest.raises(UserError, match=r"does not begin as it did before.* Seed every random"):
        lift(folder, text)


def test_weights_that_were_only_copied_are_none_of_the_model(folder):
    """nn.TransformerEncoder copies a layer that is no part of it; an average copies the model."""
    text = """
import copy
import torch
from torch import nn
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        return self.head(self.encoder(x).mean(1))
model = Classifier()
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    loss = model(torch.randn(4, 6, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found, step = lift(folder, text)
    assert found.words.startswith("Classifier with ") and type(step.model).__name__ == "Classifier"


def test_modules_that_are_called_one_by_one_are_lifted_together(folder):
    """An encoder and a head without a module that holds both; a custom method of a module."""
    text = MLP.replace("logits = model(x)", "logits = model[2](model[1](model[0](x)))")
    _, step = lift(folder, text)
    assert len(list(step.model.parameters())) == 4
    apart = """
import torch
from torch import nn
torch.manual_seed(0)
def run():
    encoder, head = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()])
    while True:
        x = torch.randn(2, 4)
        loss = (head(encoder(x).tanh()).view(2) - x.sum(-1)).square().mean()
        optimizer.zero_grad(); loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0); optimizer.step()
if __name__ == "__main__":
    run()
"""
    found, step = lift(folder, apart)
    assert "of some weights are clipped there, here those of all" in found.words
    x = torch.randn(2, 4)
    expected = (step.model[1](step.model[0](x).tanh()).view(2) - x.sum(-1)).square().mean()
    torch.testing.assert_close(step.workload.loss(step.model, [x, x.sum(-1)]).loss, expected)


LOOP = "    optimizer.zero_grad()\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "    optimizer.step()\n",
            "    optimizer.step()\n    other.step()\n",
            r"steps several optimizers \(train.py:\d+ .* and train.py:\d+ .*, and a step has one",
        ),
        ("optimizer.step()", "optimizer.step(lambda: loss)", r"a closure.*train.py:\d+"),
        (
            "    loss.backward()",
            "    loss = loss * (step + 1)\n    loss.backward()",
            r"in another way from step to step \(train.py:\d+ .*mul",
        ),
        ("args.steps:", "1:", r"ended after 1 step \(1 backward pass\), and .* needs 4 steps"),
        (
            "    optimizer.step()\n    schedule.step()\n",
            "    for p in model.parameters(): p.data -= p.grad\n",
            r"after 0 steps \(8 backward passes\), and called step\(\) of no optimizer of torch",
        ),
        ("model(x)", "model(y)", r"fails with RuntimeError: .*before its first backward pass"),
        (
            "    optimizer.step()\n",
            "    nn.utils.clip_grad_value_(model.parameters(), 1.0)\n    optimizer.step()\n",
            r"clips gradients by value.*train.py:\d+",
        ),
    ],
)
def test_what_cannot_be_lifted_is_said_with_its_line(folder, old, new, said):
    text = MLP.replace("schedule =", "other = torch.optim.Adam(model[0].parameters())\nschedule =")
    assert old in text
    import re

    found = refusal(folder, text.replace(old, new))
    assert re.search(said, found), found


def test_what_is_no_python_is_said_with_its_line(folder):
    told = refusal(folder, "import torch\nx = torch.randn(4, 4\n")
    assert "fails with SyntaxError: '(' was never closed (train.py:2" in told
    write(folder, "def f(:", "net.py")
    assert "(net.py:1" in refusal(folder, "import net")
    assert "(train.py:2" in refusal(folder, "import ast\nast.literal_eval('4 4')")


def test_a_default_device_of_the_script_ends_with_it(folder):
    text = MLP.replace("torch.manual_seed(3)", "torch.set_default_device('cpu'); dropped = 0")
    lift(folder, text.replace("nn.ReLU()", "nn.Dropout()"))  # drawn again for the proof
    assert torch.overrides._len_torch_function_stack() == 0


GAN = """
import torch
from torch import nn
one, two = nn.Linear(2, 3), nn.Linear(3, 1)
first, second = (torch.optim.Adam(net.parameters(), betas=(0.5, 0.9)) for net in (one, two))
for number in range(20):
    fake = one(torch.randn(4, 2))
    first.zero_grad(); two(fake.detach()).mean().backward(); second.step()
    two(fake).mean().backward(); first.step()
"""
# Both losses go through both networks, so that only their order tells them apart.
GAN_WITH_NOISE = GAN.replace("two(fake.detach())", "(two(torch.randn(4, 3)) - two(fake.detach()))")


# Both backward passes, then both updates.
GAN_AT_ONCE = GAN.replace("second.step()\n", "\n").replace(
    "first.step()", "second.step(); first.step()"
)


@pytest.mark.parametrize(
    ("text", "first"),
    [(GAN, 8), (GAN_WITH_NOISE, 8), (GAN_AT_ONCE, 9)],
    ids=("plain", "noise", "once"),
)
def test_a_gan_is_said_to_have_several_optimizers(folder, text, first):
    found = refused(folder, text)
    lines = f"train.py:{first} (<module>) and train.py:9 (<module>)"
    assert found.refusal == f"train.py steps several optimizers ({lines}), and a step has one."
    assert "docs/own_models.md" in found.remedy and '"GANs"' in found.remedy
    assert "betas=(0.5, 0.9), **how)" in found.beginning


def test_one_of_several_optimizers_that_steps_alone_is_told(folder):
    """As in a GAN whose critic makes five steps before the other network makes one."""
    text = GAN.replace("    two(fake)", "    if number % 5 == 4: two(fake)")
    found = refused(folder, text)
    assert "has 2 optimizers, of which one (train.py:8 (<module>)) makes the first" in found.refusal
    assert '"GANs"' in found.remedy
    apart = text.replace(
        "fake = one(torch.randn(4, 2))", "with torch.no_grad(): fake = one(torch.randn(4, 2))"
    )
    found, _ = lift(folder, apart)
    assert "the update of 1 other optimizer is left out" in found.words


def test_an_optimizer_that_calls_the_loss_itself_is_refused_without_a_start(folder):
    """steplab.optimize would refuse it too."""
    text = MLP.replace("SGD(model.parameters(), lr=0.1, momentum=0.9)", "LBFGS(model.parameters())")
    text = text.replace("optimizer.step()", "optimizer.step(lambda: loss)")
    found = refused(folder, text)
    assert "train.py trains with LBFGS (train.py:24 (<module>)), which calls the" in found.refusal
    assert "AdamW or SGD" in found.remedy and not found.beginning and not found.ended


def test_a_script_with_too_few_steps_is_told_how_many_it_needs(folder):
    write(folder, NET, "net.py")
    found = refused(folder, NANO, "--max_iters=1 --gradient_accumulation_steps=2")
    assert "ended after 1 step (2 backward passes), and steplab needs 2 steps." in found.refusal
    assert found.remedy == "Let it make more of them." and found.ended and not found.beginning


def test_functions_with_a_backward_of_their_own_are_one_call(folder):
    text = MLP.replace(
        "losses = []",
        "losses = []\nclass Double(torch.autograd.Function):\n"
        "    forward = staticmethod(lambda ctx, x: 2 * x)\n"
        "    backward = staticmethod(lambda ctx, g: 7 * g)\n",
    )
    _, step = lift(folder, text.replace("logits = model(x)", "logits = Double.apply(model(x))"))
    step.mode = "forward+backward"
    batch = next(step.workload.batches(8, torch.device("cpu"), 0))
    plain = 2 * step.model(batch[0])
    loss = step.workload.loss(step.model, batch).loss
    found, expected = (torch.autograd.grad(x.sum(), step.model[2].bias)[0] for x in (loss, plain))
    assert found.shape == expected.shape  # seven times softmax's gradients, plus the penalty's
    weights = torch.tensor([1.0, 2.0, 3.0])
    own = torch.nn.functional.cross_entropy(plain, batch[1], weight=weights)
    (to_logits,) = torch.autograd.grad(own, plain, retain_graph=True)
    penalty = 2e-3 * step.model[2].bias
    torch.testing.assert_close(found, 7 * to_logits.sum(0) + penalty)


def test_words_that_the_script_refuses(folder, capfd):
    found = refusal(folder, MLP, "--wdith 3")
    assert "train.py ended by itself with code 2 before its first backward pass." in found
    assert "unrecognized arguments: --wdith" in capfd.readouterr().err


def test_a_script_that_ends_with_code_0_has_ended(folder):
    found = refusal(folder, "import sys\nsys.exit(0)\n")
    assert "train.py ended before its first backward pass." in found


def test_files_of_the_user_stay_as_they_are(folder):
    (folder / "log.txt").write_text("mine")
    text = MLP.replace(
        "losses = []",
        "losses = []\nwith open('log.txt', 'a') as log: log.write(' and more')\n"
        "import os, pathlib\n"
        "assert pathlib.Path('log.txt').read_text() == 'mine and more'\n"
        "pathlib.Path('deep/er').mkdir(parents=True)\n"
        "pathlib.Path('deep/er/new.tmp').write_text('new')\n"
        "os.replace('deep/er/new.tmp', 'log.txt')\n"
        "assert pathlib.Path('log.txt').read_text() == 'new'\n",
    )
    lift(folder, text)
    assert (folder / "log.txt").read_text() == "mine" and not (folder / "deep").exists()


CLEARING = """
import os, shutil
import torch
from torch import nn

shutil.rmtree("runs")
os.makedirs("runs")
os.remove("old.log")
os.rename("best.pt", "best-before.pt")
with open("best-before.pt") as file:
    assert file.read() == "best"
with open("old.log", "a") as file:
    file.write("new")
with open("old.log") as file:
    assert file.read() == "new"
os.mkdir("scratch")
os.rmdir("scratch")
model = nn.Linear(3, 1).eval()
compiled = torch.compile(model)
optimizer = torch.optim.SGD(compiled._orig_mod.parameters(), lr=0.1)
for _ in range(9):
    compiled(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_a_script_removes_or_renames_stays(folder):
    (folder / "runs" / "one").mkdir(parents=True)
    for name in ("runs/one/weights.pt", "old.log", "best.pt"):
        write(folder, name.rpartition("/")[2].partition(".")[0], name)
    time.sleep(0.1)  # older than the script
    found, step = lift(folder, CLEARING)
    assert {p.name: p.read_text() for p in folder.rglob("*") if p.suffix in (".pt", ".log")} == {
        "weights.pt": "weights",
        "old.log": "old",
        "best.pt": "best",
    }
    assert not (folder / "scratch").exists()
    assert "_orig_mod" not in str(list(step.model.state_dict()))
    assert found.words.endswith("trains its model in eval mode, here it is in training mode")


def test_a_folder_that_was_there_is_not_renamed(folder):
    (folder / "runs").mkdir()
    text = CLEARING.replace('shutil.rmtree("runs")', 'os.rename("runs", "runs-before")')
    assert "renames the folder" in refusal(folder, text) and (folder / "runs").exists()


def test_a_hugging_face_loop(folder):
    pytest.importorskip("transformers", reason="transformers is an optional extra, steplab[hf]")
    text = """
import torch
from transformers import BertConfig, BertForSequenceClassification
torch.manual_seed(0)
config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=16, vocab_size=50)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
while True:
    batch = {"input_ids": torch.randint(1, 50, (2, 7)), "labels": torch.randint(2, (2,))}
    outputs = model(**batch)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found, step = lift(folder, text)
    assert found.batch == 2 and type(step.model).__name__ == "BertForSequenceClassification"
    batch = next(step.workload.batches(2, torch.device("cpu"), 0))
    step.model.eval()
    expected = step.model(input_ids=batch[0], labels=batch[1]).loss
    torch.testing.assert_close(step.workload.loss(step.model, batch).loss, expected)

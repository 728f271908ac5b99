"""The start of a factory holds what a script has shown, and imports only what there is."""

import pytest

from steplab.workloads.user_model import load_user_model
from tests.workloads.script.test_lift import MLP, NET, refused, write

# What no step does, so that every script with it is refused.
BY_VALUE = "nn.utils.clip_grad_value_(model.parameters(), 1.0)"
MADE = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"


def start_for(folder, made=MADE, text=MLP):
    """Return the start for a script whose optimizer is made so; it must import."""
    text = text.replace(MADE, made).replace("    optimizer.step()", f"    {BY_VALUE}")
    start = refused(folder, text).beginning
    write(folder, start, "my_model.py")
    assert load_user_model("my_model.py:make").name == "my_model.py:make"
    return start


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (MADE, "SGD(model.parameters(), lr=0.1, momentum=0.9, **how)\n"),
        ("torch.optim.AdamW(model.parameters(), fused=False)", "(), lr=0.001, **how)\n"),
        (
            "torch.optim.Adam(model.parameters(), torch.tensor(0.5), (0.5, 0.9), amsgrad=True)",
            "Adam(model.parameters(), lr=0.5, betas=(0.5, 0.9), amsgrad=True, **how)\n",
        ),
        (
            "torch.optim.AdamW([{'params': model[0].parameters(), 'weight_decay': 0.5}, "
            "{'params': model[2].parameters()}], 0.2)",
            "(), lr=0.2, **how)  # train.py has 2 groups, which differ in weight_decay\n",
        ),
        ("torch.optim.LBFGS(model.parameters())", "return ...  # an optimizer whose step() needs"),
    ],
)
def test_the_optimizer_keeps_the_options_that_are_not_its_defaults(folder, made, said):
    assert said in start_for(folder, made)


def test_modules_of_torch_are_called_as_everybody_does(folder):
    start = start_for(folder)
    assert "from torch import nn\n" in start
    assert "    model = nn.Sequential(...)  # as in train.py\n" in start


def test_a_class_of_the_script_itself_is_not_imported(folder):
    """That would train; and no other module has it."""
    text = MLP.replace("torch.manual_seed(3)", "class Net(nn.Sequential): pass")
    start = start_for(folder, text=text.replace("model = nn.Sequential", "model = Net"))
    assert "import Net" not in start and "import nets" not in start
    assert "    model = Net(...)  # the class in train.py: bring it here" in start


def test_a_class_of_a_neighbor_is_imported_from_there(folder):
    write(folder, NET, "net.py")
    text = MLP.replace("from torch import nn", "from torch import nn\nfrom net import GPT")
    text = text.replace("model = nn.Sequential(", "model = GPT(5, 4)\nunused = (")
    text = text.replace("logits = model(x)", "logits, loss = model(y[:, None], y)")
    text = text.replace("loss = criterion(logits, y)", "logits = logits[:, 0]")
    start = start_for(folder, text=text)
    assert "from net import GPT\n" in start and "    model = GPT(...)  # as in train.py\n" in start


def test_a_model_that_was_not_seen_is_left_open(folder):
    """A list of the modules that the script calls one by one is no class of its own."""
    text = MLP.replace("logits = model(x)", "logits = model[2](model[0](x))")
    start = start_for(folder, text=text.replace("model.parameters()", "[*model[0].parameters()]"))
    assert "    model = " in start and "ModuleList" not in start

"""Small timelines with known answers: where does an instant on a thread belong?"""

from pathlib import Path

import numpy as np
import pytest

import steplab
from steplab.trace.analysis import Labels
from steplab.trace.attribution import Attribution
from steplab.trace.lines import user_line
from steplab.trace.phases import phase_of_range
from tests.trace.traces import AUTOGRAD, MAIN, op, python, range_, trace_of

NODE = "autograd::engine::evaluate_function: MmBackward0"


def place(events, time: int, thread: int = MAIN) -> dict[str, str]:
    """Return phase, module, line and op at one instant."""
    trace, labels = trace_of(events), Labels()
    attribution = Attribution(trace, labels)
    number = trace.threads.index(f"100/{thread}")
    found = attribution.at(np.array([number]), np.array([time]))
    texts = labels.texts()
    names = ("phase", "module", "line", "op")
    return {name: texts[int(getattr(found, name)[0])] for name in names}


FORWARD = [
    range_("forward", 0, 1_000),
    range_("module:blocks.0", 50, 500),
    range_("module:blocks.0.attention", 100, 200),
    python("model.py(12): forward", 60, 480),
    python("torch/nn/modules/linear.py(130): forward", 110, 150),
    op("aten::linear", 120, 100, sequence=4, forward_thread=0),
    op("aten::mm", 130, 50, sequence=5, forward_thread=0),
]
BACKWARD = [
    range_("backward", 1_100, 900),
    op(NODE, 1_200, 300, AUTOGRAD, sequence=5, forward_thread=1),
    op("MmBackward0", 1_210, 280, AUTOGRAD, sequence=5, forward_thread=1),
    op("aten::mm", 1_220, 100, AUTOGRAD),
]


def test_the_innermost_of_each_kind_counts():
    assert place(FORWARD, 140) == {
        "phase": "forward",
        "module": "blocks.0.attention",
        "line": "model.py:12 (forward)",
        "op": "aten::mm",
    }
    assert place(FORWARD, 400)["module"] == "blocks.0"
    assert place(FORWARD, 5_000) == dict.fromkeys(("phase", "module", "line", "op"), "unattributed")


def test_the_backward_belongs_to_the_module_and_line_of_its_forward():
    assert place(FORWARD + BACKWARD, 1_250, AUTOGRAD) == {
        "phase": "backward",
        "module": "blocks.0.attention",
        "line": "model.py:12 (forward)",
        "op": "aten::mm",
    }


def test_the_operator_that_made_the_node_counts_not_one_that_read_the_counter():
    events = [
        python("first.py(1): f", 0, 50),
        op("aten::detach", 10, 20, sequence=5, forward_thread=0),
        python("second.py(2): g", 60, 50),
        op("aten::mm", 70, 20, sequence=5, forward_thread=0),
        *BACKWARD,
    ]
    assert place(events, 1_250, AUTOGRAD)["line"] == "second.py:2 (g)"


def test_sequence_numbers_of_two_forward_threads_are_kept_apart():
    other = 555
    events = [
        *[op("aten::mm", 10 * i, 5, sequence=i, forward_thread=0) for i in range(1, 9)],
        python("main.py(1): f", 0, 100),
        *[op("aten::mm", 10 * i, 5, other, sequence=i, forward_thread=0) for i in range(5, 15)],
        python("other.py(1): g", 0, 200, other),
    ]
    nodes = [op(NODE, 1_000 + 10 * i, 5, AUTOGRAD, sequence=i, forward_thread=1) for i in (1, 6)]
    theirs = [op(NODE, 2_000 + 10 * i, 5, AUTOGRAD, sequence=i, forward_thread=2) for i in (6, 14)]
    assert place(events + nodes + theirs, 1_061, AUTOGRAD)["line"] == "main.py:1 (f)"
    assert place(events + nodes + theirs, 2_061, AUTOGRAD)["line"] == "other.py:1 (g)"


def test_a_forward_that_is_not_in_the_trace_leaves_the_backward_unattributed():
    found = place(BACKWARD, 1_250, AUTOGRAD)
    assert (found["phase"], found["module"], found["line"]) == (
        "backward",
        "unattributed",
        "unattributed",
    )


def test_a_module_that_is_recomputed_in_the_backward_is_its_own():
    inside = [
        range_("FORWARD", 1_300, 100, AUTOGRAD),
        range_("module:blocks.9", 1_310, 80, AUTOGRAD),
        python("other.py(7): forward", 1_310, 80, AUTOGRAD),
        op("aten::mm", 1_320, 20, AUTOGRAD, sequence=9, forward_thread=0),
    ]
    assert place(FORWARD + BACKWARD + inside, 1_330, AUTOGRAD) == {
        "phase": "backward",
        "module": "blocks.9",
        "line": "other.py:7 (forward)",
        "op": "aten::mm",
    }


def test_an_optimizer_that_a_hook_runs_in_the_backward_stays_one():
    hook = range_("Optimizer.step#SGD.step", 1_300, 100, AUTOGRAD)
    assert place([*FORWARD, *BACKWARD, hook], 1_350, AUTOGRAD)["phase"] == "optimizer"


def test_the_backward_of_a_cpu_runs_on_the_main_thread():
    events = [
        *FORWARD,
        range_("backward", 1_100, 900),
        python("train.py(3): step", 1_050, 1_000),
        op(NODE, 1_200, 300, sequence=5, forward_thread=1),
        op("aten::mm", 1_220, 100),
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 1_600, 50),
    ]
    assert place(events, 1_250)["line"] == "model.py:12 (forward)"
    accumulate = place(events, 1_610)
    assert (accumulate["phase"], accumulate["module"]) == ("backward", "unattributed")
    assert accumulate["line"] == "train.py:3 (step)"


def test_a_thread_of_autograd_is_in_the_backward_while_its_range_is_open():
    events = [*BACKWARD, op("aten::copy_", 1_600, 50, AUTOGRAD), op("aten::copy_", 1_600, 50, 777)]
    assert place(events, 1_610, AUTOGRAD)["phase"] == "backward"
    assert place(events, 1_610, 777)["phase"] == "unattributed"


def test_without_our_ranges_the_profilers_own_marks_tell():
    events = [
        range_("train_step", 0, 900),
        python("nn.Module: Linear_0", 10, 50),
        python("nn.Module: GraphModule_3", 15, 20),
        range_("Optimizer.step#AdamW.step", 100, 50),
        python("torch/nn/utils/clip_grad.py(33): clip_grad_norm_", 200, 50),
        python("torch/_tensor.py(566): backward", 300, 50),
        range_("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 400, 50),
    ]
    phases = [place(events, time)["phase"] for time in (20, 120, 220, 320, 420, 520)]
    assert phases == ["forward", "optimizer", "clip", "backward", "data", "train_step"]
    assert place(events, 20)["module"] == "Linear_0"


def test_a_phase_of_the_users_own_is_its_outermost_range():
    events = [range_("decode", 0, 100), range_("sample", 10, 50), range_("nccl:all_reduce", 0, 200)]
    assert place(events, 20)["phase"] == "decode"
    assert place(events, 150)["phase"] == "unattributed"


@pytest.mark.parametrize(
    ("name", "phase"),
    {
        "FORWARD": "forward",
        "backward": "backward",
        "OPTIMIZER": "optimizer",
        "Optimizer.zero_grad#SGD.zero_grad": "optimizer",
        "clip_grad_norm": "clip",
        "DistributedDataParallel.forward": "forward",
        "forward_attention": None,
        "ProfilerStep#3": None,
    }.items(),
)
def test_ranges_that_are_phases(name, phase):
    assert phase_of_range(name) == phase


@pytest.mark.parametrize(
    ("call", "line"),
    {
        "model.py(12): forward": "model.py:12 (forward)",
        "/home/me/project/model.py(12): forward": "project/model.py:12 (forward)",
        "transformers/models/gpt2/modeling.py(3): f": "transformers/models/gpt2/modeling.py:3 (f)",
        "steplab/modules/attention.py(24): forward": "steplab/modules/attention.py:24 (forward)",
        "/x/src/steplab/workloads/gpt/model.py(9): f": "gpt/model.py:9 (f)",
        "<ipython-input-3-ab>(4): train": "<ipython-input-3-ab>:4 (train)",
        "steplab/step/step.py(52): __call__": None,
        "torch/nn/modules/linear.py(130): forward": None,
        "/venv/lib/python3.11/site-packages/einops/einops.py(3): f": None,
        "/tmp/torchinductor_me/ab/cab.py(88): call": None,
        "<built-in function linear>": None,
        "<frozen runpy>(88): _run_code": None,
        "threading.py(1002): _bootstrap": None,
        "nn.Module: Linear_0": None,
    }.items(),
)
def test_lines_of_user_code(call, line):
    assert user_line(call) == line


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/home/me/steplab/my_model.py", True),
        ("/home/me/steplab/examples/own_model.py", True),
        ("/home/me/steplab/src/steplab/engine/step.py", False),
        ("/venv/lib/python3.11/site-packages/steplab/workloads/gpt/model.py", True),
        ("/venv/lib/python3.11/site-packages/steplab/units.py", False),
        ("steplab/probes/clock.py", False),
        ("steplab/modules/optimizer.py", False),
    ],
)
def test_a_folder_called_steplab_is_not_the_package(path, seen):
    assert (user_line(f"{path}(12): forward") is not None) == seen


def test_of_our_own_packages_only_those_of_models_are_user_code():
    folders = {path.parent.name for path in Path(steplab.__path__[0]).glob("*/__init__.py")}
    shown = {name for name in folders if user_line(f"steplab/{name}/file.py(12): forward")}
    assert shown == {"workloads", "modules", "kernels", "data"}

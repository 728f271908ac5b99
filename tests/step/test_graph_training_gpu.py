"""Training with the step as a graph, on a GPU."""

from dataclasses import replace

import pytest

from steplab.train.checkpoint_files import newest_checkpoint
from steplab.train.loop import train
from steplab.train.stop import Stop
from tests.train.tiny_runs import StopAfter, assert_same_state, make_spec, silent

pytestmark = pytest.mark.gpu

RECIPE = "precision=bf16,optimizer=fused,impl.attention=math,cuda_graph=step"


def test_training_resumes_exactly_and_validates_beside_the_graph(tmp_path):
    """Ten steps are five, a resume with a new capture, and five; validation runs plainly."""

    def spec(name):
        settings = {"steps_per_epoch": 10, "validate_every": 4, "checkpoint_every": 5}
        return replace(make_spec(tmp_path / name, RECIPE, **settings), device="cuda")

    whole = spec("whole")
    outcome = train(whole, silent(), Stop())
    assert outcome.step == 10 and outcome.metrics["val"] > 0
    train(spec("halves"), silent(), StopAfter(5))
    train(spec("halves"), silent(), Stop(), newest_checkpoint(tmp_path / "halves"))
    assert_same_state(tmp_path / "whole", tmp_path / "halves", whole)

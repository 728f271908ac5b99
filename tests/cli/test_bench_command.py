"""The command that `tune` prints measures the step that was tuned."""

import shlex
from pathlib import Path

import pytest

from steplab.cli.bench.step import COMMAND
from steplab.cli.command import Parser
from steplab.cli.flags import given_fields
from steplab.cli.tune import bench_command
from steplab.core import RunSpec
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload


def test_size_batch_and_mode_are_told():
    config = find_workload("gpt").resolve("xl", {})
    told = bench_command(RunSpec("gpt", config, "xl", batch=4), Path("best.toml"))
    assert told == "steplab bench step gpt --size xl --batch 4 --mode full --recipe best.toml"


@pytest.mark.parametrize("size", ["", "tiny"])
def test_bench_understands_what_differs_from_the_preset(size, tmp_path):
    config = find_workload("gpt").resolve(size, {"context": 96, "fused_projections": True})
    spec = RunSpec("gpt", config, size, batch=3, accumulate=2, mode="forward+backward")
    path = tmp_path / "with a space.toml"
    path.write_text('[precision]\ndtype = "bf16"\n')
    words = shlex.split(bench_command(spec, path))[3:]
    parser = Parser("steplab bench step", "")
    COMMAND.flags(parser, words)
    args = parser.parse(words)
    assert (args.batch, args.accumulate, args.mode) == ([3], 2, ["forward+backward"])
    assert args.recipe == [parse_recipe("precision=bf16")]
    assert given_fields(args) == {"context": [96], "fused_projections": [True]}

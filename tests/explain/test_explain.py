from dataclasses import replace

import pytest

from steplab.explain import explain
from steplab.record import Ran, Samples
from tests.compare.test_steps import make_run


def with_clock(**changes):
    run = make_run()
    return replace(run, clock=replace(run.clock, **changes))


def test_a_clean_run_has_no_finding():
    assert explain(make_run()) == ()
    assert explain(make_run(status="oom")) == ()


def test_each_fault_is_named():
    stalled = with_clock(data_wait=Samples((1.0, 1.0), "ms"))
    assert [f.rule for f in explain(stalled)] == ["data_stall"]
    noisy = with_clock(step=Samples((8.0, 10.0, 14.0, 9.0, 13.0), "ms"))
    assert [f.rule for f in explain(noisy)] == ["noisy_measurement"]
    slow = replace(
        with_clock(phases={"optimizer": Samples((2.0,), "ms")}), ran=Ran(optimizer="foreach")
    )
    assert [f.rule for f in explain(slow)] == ["unfused_optimizer"]
    assert explain(replace(slow, ran=Ran(optimizer="fused"))) == ()


def test_the_largest_stake_comes_first():
    run = with_clock(data_wait=Samples((1.0,), "ms"), phases={"optimizer": Samples((3.0,), "ms")})
    findings = explain(replace(run, ran=Ran(optimizer="forloop")))
    assert [(f.rule, f.stake_ms) for f in findings] == [("unfused_optimizer", 3), ("data_stall", 1)]
    assert all(f.evidence and f.remedy for f in findings)


def test_the_command(store, capsys):
    pytest.importorskip("rich")
    from steplab.cli.main import main

    run = with_clock(data_wait=Samples((1.0,), "ms"))
    store.save(run)
    assert main(["explain", "--store", str(store.root)]) == 0
    out = capsys.readouterr().out
    assert run.id in out and "data_stall [1.000 ms]" in out and "remedy" in out
    assert main(["explain", "nothing", "--store", str(store.root)]) == 2

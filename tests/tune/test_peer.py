"""A recipe that was found by hand, beside the winner."""

from steplab.techniques.recipes import parse_recipe
from steplab.tune.champion import Champion
from steplab.tune.climb import measure_peer
from steplab.tune.options import GateOptions
from steplab.tune.progress import NullView
from steplab.tune.report import peer_line
from tests.tune.ladders import NoProcesses, World, candidates_of, simulated_run, use_world
from tests.tune.test_climb import SPEC

BY_HAND = parse_recipe("optimizer=fused")


def champion_in(world):
    candidate = candidates_of(world)(SPEC, None, NoProcesses())
    return Champion(candidate, simulated_run(SPEC, world.ms(frozenset())), (), {})


def test_the_winner_is_told_as_a_multiple_of_the_peers_speed(monkeypatch):
    world = World({"optimizer": 0.8})
    use_world(monkeypatch, world, [])
    monkeypatch.setattr("steplab.tune.climb.RemoteCandidate", candidates_of(world))
    peer = measure_peer(
        BY_HAND, champion_in(world), GateOptions(pool=NoProcesses()), 60.0, NullView()
    )
    assert peer.change is not None and abs(peer.change.value - 0.25) < 0.01
    assert peer_line(peer).startswith("0.80 times as fast as optimizer=fused (0.")
    assert " ms a step, optimizer=fused 80." in peer_line(peer)
    assert world.alive == 1, "the champion lives on"


def test_a_peer_that_cannot_run_costs_nothing_else(monkeypatch):
    world = World(broken={"optimizer": "oom"})
    monkeypatch.setattr("steplab.tune.climb.RemoteCandidate", candidates_of(world))
    peer = measure_peer(
        BY_HAND, champion_in(world), GateOptions(pool=NoProcesses()), 60.0, NullView()
    )
    assert peer.change is None and peer.reason == "oom: it broke"
    assert "could not be measured: oom" in peer_line(peer)
    lost = World(lost_in_turns={"optimizer"})
    monkeypatch.setattr("steplab.tune.climb.RemoteCandidate", candidates_of(lost))
    peer = measure_peer(
        BY_HAND, champion_in(lost), GateOptions(pool=NoProcesses()), 60.0, NullView()
    )
    assert "worker was lost" in peer.reason

"""How long collectives take: against NCCL's own formulas by hand, and fits against known links."""

from dataclasses import replace

import pytest

from steplab.core import Column, Table
from steplab.core.run import Accelerator
from steplab.estimate.cluster import START_US, Cluster, Point, fit_link, measured_links
from steplab.hardware.links import ASSUMED, LINKS, find_link
from tests.compare.sides import ENVIRONMENT, run_of

NVLINK, NDR = find_link("nvlink4"), find_link("ndr")
CLUSTER = Cluster(NVLINK, NDR)
GPU = replace(ENVIRONMENT, accelerators=(Accelerator("NVIDIA H200", 141 * 10**9),))


def test_a_ring_within_a_machine_is_its_steps_and_its_bytes():
    size = 10**9
    by_hand = START_US + 7 * NVLINK.latency_us + 7 / 8 * size / (450e3 * 0.82)
    assert CLUSTER.time("all-gather", 8, size).us == pytest.approx(by_hand)
    assert CLUSTER.time("all-reduce", 8, size).us == pytest.approx(2 * by_hand - START_US)


def test_a_ring_over_machines_is_as_fast_as_all_their_network_cards():
    """8 cards of 50 GB/s reach 324 GB/s, where one of them would reach 40."""
    us = CLUSTER.time("all-gather", 16, 10**10).us - CLUSTER.time("all-gather", 16, 0).us
    assert 15 / 16 * 10**10 / us == pytest.approx(8 * 50e3 * 0.81)
    alone = CLUSTER.time("all-to-all", 16, 10**10).us - CLUSTER.time("all-to-all", 16, 0).us
    assert 15 / 16 * 10**10 / alone == pytest.approx(50e3 * 0.81)


def test_ranks_of_a_group_that_are_a_machine_apart_have_one_card_each():
    near, apart = (CLUSTER.time("all-reduce", 4, 10**9, stride) for stride in (1, 8))
    assert apart.us > 8 * near.us
    assert CLUSTER.link("all-reduce", 4, 1) is NVLINK and CLUSTER.link("all-reduce", 4, 8) is NDR


def test_an_all_reduce_of_many_machines_goes_along_a_tree():
    ring = 2 * (7 * 128 * NVLINK.latency_us + 127 * NDR.latency_us)
    tree = 2 * (7 * NVLINK.latency_us + 7 * NDR.latency_us)
    assert CLUSTER.time("all-reduce", 1024, 0).us == pytest.approx(START_US + tree)
    assert CLUSTER.time("all-gather", 1024, 0).us == pytest.approx(START_US + ring / 2)


def test_what_nobody_has_measured_is_less_sure():
    assumed = [link for link in LINKS if link.reached == ASSUMED]
    assert {link.name for link in assumed} == {"efa", "ethernet100"}
    assert all(link.spread == 2 * NVLINK.spread for link in assumed)
    assert "70% of it are assumed" in find_link("efa").known_by
    assert all(link.source for link in LINKS)


@pytest.mark.parametrize("op", ["all-reduce", "all-gather", "all-to-all"])
def test_a_fit_finds_the_link_that_made_the_times(op):
    true = Cluster(replace(NVLINK, latency_us=3.0, gbs=200, efficiency=1.0), NDR)
    points = [
        Point(ranks, size, true.time(op, ranks, size).us)
        for ranks in (2, 4, 8)
        for size in (10**5, 10**7, 10**9)
    ]
    found = fit_link(op, points, "H200 SXM")
    assert (found.latency_us, found.gbs) == (pytest.approx(3.0), pytest.approx(200))
    assert found.spread == 0.05  # never surer than that


def timed(op, world, size, us, environment=GPU, device="cuda", **config):
    """A Run as `bench collectives` stores it."""
    config = {"op": op, "world": world, "mib": size / 2**20, **config}
    run = run_of((us / 1e3,) * 5, workload="collectives", config=config, device=device)
    bandwidth = Table("", (Column("message", "B"),), ((size,),))
    return replace(run, environment=environment, tables={"bandwidth": bandwidth})


def test_times_of_the_same_cards_replace_the_catalog_within_a_machine():
    runs = [timed("all-reduce", 2, size, 20 + size / 1e5) for size in (10**6, 10**8)]
    elsewhere = timed("all-gather", 2, 10**6, 900, ENVIRONMENT, "cpu")
    links = measured_links([*runs, elsewhere, run_of()], "H200 SXM")
    assert list(links) == ["all-reduce"]
    cluster = replace(CLUSTER, measured=links)
    assert cluster.time("all-reduce", 2, 10**8).us == pytest.approx(1020, rel=0.02)
    assert cluster.time("all-gather", 2, 10**8) == CLUSTER.time("all-gather", 2, 10**8)
    assert "all-reduce measured; bench collectives on 2 ranks of H200 SXM" in cluster.known_by
    assert cluster.link("all-reduce", 2).spread < NVLINK.spread
    assert measured_links(runs, "B200") == {}

"""Variables that hold tensors after a step."""

import gc

import pytest
import torch

from steplab.estimate.counted import count
from steplab.parallel.world import leave
from steplab.probes.holders import holding_places, plain_addresses
from tests.estimate.specs import H200, spec_of

OF_THE_MODULE = []


@pytest.fixture(autouse=True)
def nothing_is_frozen():
    """The collector does not tell who refers to what from among frozen objects."""
    gc.unfreeze()
    yield
    gc.freeze()


class Owner:
    pass


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def names(tensor):
    return {place.partition(",")[0] for place in holding_places({address(tensor)})}


def test_lists_attributes_closures_and_dicts_are_named():
    in_module, in_attribute, in_closure, in_dict = (torch.ones(100 + i) for i in range(4))
    OF_THE_MODULE.append(in_module)
    owner, closed = Owner(), [in_closure]
    owner.last_output = in_attribute
    owner.by_name = {"first": (in_dict,)}

    def step():
        closed.append(1)

    step()
    assert "OF_THE_MODULE" in names(in_module)
    assert "last_output" in names(in_attribute)
    assert "closed" in names(in_closure)
    assert "by_name" in names(in_dict) and "first" not in names(in_dict)
    OF_THE_MODULE.clear()


def test_what_holds_a_graph_holds_the_memory_behind_it():
    owner = Owner()
    owner.last_loss = torch.ones(3, requires_grad=True).exp().sum()
    (place,) = (place for place in holding_places({0}) if place.startswith("last_loss"))
    line = test_what_holds_a_graph_holds_the_memory_behind_it.__code__.co_firstlineno + 2
    assert f"test_holders.py:{line} (test_what_holds" in place


def test_nothing_is_held_by_the_search_itself():
    assert names(torch.ones(7)) == set()


def test_shards_without_data_that_an_estimate_left_behind_hold_nothing():
    leave()  # the group of one rank that an earlier test may have made
    gc.disable()
    try:
        count(spec_of("parallel=fsdp", ranks=2), H200)
        assert names(torch.ones(9)) == set()
    finally:
        gc.enable()


def test_tensors_without_a_graph_hold_their_memory_plainly():
    queue, weight = torch.ones(100), torch.ones(101, requires_grad=True)
    output = (2 * weight).exp()
    shown = output.detach()  # its memory is the output's, and that has a graph
    stands_for_another = torch._to_functional_tensor(torch.ones(2))
    assert address(queue) in plain_addresses() and address(shown) not in plain_addresses()
    del output
    assert address(shown) in plain_addresses() and stands_for_another is not None

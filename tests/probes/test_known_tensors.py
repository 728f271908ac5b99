"""What lives on in a process for a good reason, whoever made it."""

import gc

import torch
from torch import nn

from steplab.estimate.counted import count
from steplab.parallel.world import leave
from steplab.probes.known_tensors import held_by_objects, held_tensors, known_addresses
from tests.estimate.specs import H200, spec_of


def test_weights_gradients_states_and_the_batch_are_known():
    model, batch = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(batch).sum().backward()
    optimizer.step()
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    found = known_addresses({"x": batch})
    for tensor in (batch, *model.parameters(), *(p.grad for p in model.parameters()), *states):
        assert tensor.untyped_storage().data_ptr() in found
    assert torch.randn(5).untyped_storage().data_ptr() not in found


def test_shards_without_data_that_an_estimate_left_behind_are_passed_over():
    leave()  # the group of one rank that an earlier test may have made
    gc.disable()
    try:
        count(spec_of("parallel=fsdp", ranks=2), H200)
        held = list(held_by_objects())
        known_addresses(())
        held_tensors()
    finally:
        gc.enable()
    assert not any(hasattr(tensor, "full_tensor") for tensor in held)

"""The card and the link of the exhibits of ranks: right numbers, and wall time without a core."""

import socket
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "examples" / "faults"))
from hardware import card, link


def test_a_layer_of_the_card_is_a_product():
    torch.manual_seed(0)
    x_ND, w_DF = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 4), (4, 5)))
    inputs = x_ND.requires_grad_(), w_DF.requires_grad_()
    torch.testing.assert_close(card.linear(*inputs, 0.0), x_ND @ w_DF)
    assert torch.autograd.gradcheck(lambda *both: card.linear(*both, 0.0), inputs)


def test_a_kernel_takes_the_time_it_is_told_and_no_core():
    layer, x_ND = card.Layer(4, ms=30.0), torch.ones(2, 4)
    layer(x_ND).sum().backward()
    begin, busy = time.perf_counter(), time.thread_time()
    layer(x_ND).sum().backward()
    took, worked = time.perf_counter() - begin, time.thread_time() - busy
    assert took >= 0.06 > 2 * worked


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces a connection")
def test_connections_are_paced_and_nothing_else():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        link.slow_down()
        with near, far:
            for one in (near, far):
                rate = one.getsockopt(socket.SOL_SOCKET, link.SO_MAX_PACING_RATE)
                assert rate == link.BYTES_PER_S
            near.sendall(b"still open")
            assert far.recv(10) == b"still open"

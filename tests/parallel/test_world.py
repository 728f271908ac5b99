import torch

from steplab.parallel.world import current_world, gather_texts, in_order, share_text
from tests.parallel.ranks import run_ranks


def exchange():
    rank = current_world().rank
    texts = gather_texts("é" * 3 * rank)
    numbers = in_order(torch.tensor([rank, 10 + rank]))
    return texts, share_text(f"rank {rank}"), numbers.tolist()


def test_ranks_exchange_texts_and_numbers():
    for found in run_ranks(exchange, 2):
        assert found == (["", "ééé"], "rank 0", [0, 1, 10, 11])

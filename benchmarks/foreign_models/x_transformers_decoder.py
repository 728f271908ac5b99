"""A decoder of x-transformers, whose wrapper computes a loss of its own."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

import steplab

WORDS = 1024


def make(context: int = 64) -> steplab.UserModel:
    """A decoder with rotary positions, RMSNorm and gated feed-forward layers."""
    layers = Decoder(dim=128, depth=2, heads=4, rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True)
    network = TransformerWrapper(num_tokens=WORDS, max_seq_len=context, attn_layers=layers)

    def batches(size: int) -> Iterator[Tensor]:
        random = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(WORDS, (size, context + 1), generator=random)

    def loss(model: nn.Module, words_BT: Tensor) -> Tensor:
        return model(words_BT)

    return steplab.UserModel(AutoregressiveWrapper(network), batches, loss, context)

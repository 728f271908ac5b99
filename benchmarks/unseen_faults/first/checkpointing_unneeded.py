"""A decoder that fits into memory many times over."""

import steplab
from torch.utils.checkpoint import checkpoint

from common import Decoder, adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "checkpointing_unneeded",
    "CAUSE": "Every block is checkpointed although the activations would take a few percent of the GPU's memory, so the whole forward is computed twice.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Call the blocks directly, and checkpoint only when memory is short.",
    "STYLE": "factory",
    "BATCH": 8,
}
WIDTH, LAYERS, VOCAB, CONTEXT = pick(1024, 32), pick(8, 2), pick(8192, 64), pick(1024, 16)


class Thrifty(Decoder):
    def hidden(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # FAULT
        return self.norm(x)


def make(kind):
    model = kind(WIDTH, LAYERS, VOCAB, CONTEXT)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
        tokens_per_sequence=CONTEXT,
    )


def faulty():
    return make(Thrifty)


def clean():
    return make(Decoder)

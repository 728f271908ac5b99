"""A decoder whose blocks are compiled one by one."""

import logging

import steplab
import torch.nn.functional as F

from common import Block, Decoder, adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "logging_in_block",
    "CAUSE": "A debug call of the logger in the middle of every block breaks the compiled graph in two, so each block runs as several graphs with Python between them and fuses less.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Take the logging out of the compiled forward (or compile with fullgraph=True to be told).",
    "STYLE": "factory",
    "BATCH": 8,
}
WIDTH, LAYERS, VOCAB, CONTEXT = pick(512, 32), pick(24, 2), pick(8192, 64), pick(512, 16)
log = logging.getLogger("training")


class ChattyBlock(Block):
    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        log.debug("queries %s in %s", q.shape, q.dtype)  # FAULT
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        log.debug("attended %s", x.shape)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make(block):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
    for index in range(LAYERS):
        model.blocks[index] = block(WIDTH, max(1, WIDTH // 64))
        model.blocks[index].compile()
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
        tokens_per_sequence=CONTEXT,
    )


def faulty():
    return make(ChattyBlock)


def clean():
    return make(Block)

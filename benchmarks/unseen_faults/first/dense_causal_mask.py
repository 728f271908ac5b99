"""Causal attention over long sequences."""

import steplab
import torch
import torch.nn.functional as F

from common import Block, Decoder, adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "dense_causal_mask",
    "CAUSE": "The causal mask is passed to the attention as a dense matrix of zeros and -inf, so the flash kernel is ruled out and the masked half of the scores is computed as well.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Pass is_causal=True and no mask.",
    "STYLE": "factory",
    "BATCH": 2,
}
WIDTH, LAYERS, VOCAB, CONTEXT = pick(1024, 64), pick(6, 1), pick(8192, 64), pick(4096, 32)


class MaskedBlock(Block):
    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.full((t, t), float("-inf"), device=x.device, dtype=q.dtype).triu(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # FAULT
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make(block):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
    for index in range(LAYERS):
        model.blocks[index] = block(WIDTH, WIDTH // 64)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
        tokens_per_sequence=CONTEXT,
    )


def faulty():
    return make(MaskedBlock)


def clean():
    return make(Block)

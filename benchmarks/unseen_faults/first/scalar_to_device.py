"""Attention with a learned temperature per layer and a fixed scale."""

import steplab
import torch
import torch.nn.functional as F

from common import Block, Decoder, adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "scalar_to_device",
    "CAUSE": "A constant is turned into a GPU tensor in the forward of every layer; each such tensor is a blocking copy from the host, which waits until the GPU has caught up.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Use the Python number directly, or register the constant as a buffer once.",
    "STYLE": "factory",
    "BATCH": 2,
}
WIDTH, LAYERS, VOCAB, CONTEXT = pick(1024, 64), pick(24, 2), pick(8192, 64), pick(1024, 16)


class ScaledBlock(Block):
    copies = True

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scale = 1.0 / (w // self.heads)
        if self.copies:
            scale = torch.tensor(scale, device=x.device)  # FAULT
        y = F.scaled_dot_product_attention(q * scale, k, v, is_causal=True, scale=1.0)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainBlock(ScaledBlock):
    copies = False


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
    return make(ScaledBlock)


def clean():
    return make(PlainBlock)

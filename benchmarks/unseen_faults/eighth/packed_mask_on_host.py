"""Several short texts are packed into each row, and a token may attend to its own text only. The
collate function makes that mask, batch x 1 x time x time in fp32, on the host, and it is copied to
the device with every batch. The number of the text of each token would do: the mask takes the
device a moment. (On a CPU, host and device are the same, and so are the twins.)
A good finding names the mask's making on the host or its copy, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the attention mask of all pairs of tokens is made on the host by collate and copied in every step",
    "FIX": "send the numbers of the texts, and compare them on the device",
}
BATCH, TIME, VOCAB = by_device(16, 6), by_device(1024, 256), by_device(8192, 256)
WIDTH, LAYERS, HEADS = by_device(768, 64), by_device(8, 1), by_device(12, 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, mask):
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def rows():
    """Return packed rows: tokens, targets, and the number of each token's text."""
    text = (torch.rand(64, TIME) < 0.01).cumsum(1)
    return list(zip(*torch.randint(VOCAB, (2, 64, TIME)), text, strict=True)) * 200


def mask_of(text):
    same = text[:, None, :, None] == text[:, None, None, :]
    return torch.zeros(same.shape, device=text.device).masked_fill(~same, float("-inf"))


def with_mask(samples):
    ids, targets, text = (torch.stack(v) for v in zip(*samples, strict=True))
    return ids, targets, mask_of(text)  # guilty


def with_text(samples):
    ids, targets, text = (torch.stack(v) for v in zip(*samples, strict=True))
    return ids, targets, text


def build(collate):
    model = Model().to(device())
    optimizer = adamw(model)
    data = iter(DataLoader(rows(), BATCH, collate_fn=collate, pin_memory=device() == "cuda"))

    def step():
        ids, targets, mask = (v.to(device(), non_blocking=True) for v in next(data))
        if mask.dim() == 2:
            mask = mask_of(mask)
        if device() == "cuda":
            mask = mask.bfloat16()
        with mixed():
            loss = F.cross_entropy(model(ids, mask).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(with_mask)


def clean():
    return build(with_text)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)

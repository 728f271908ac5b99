"""A classifier of reviews pads every batch to the longest text that the model allows. Most reviews
are short: the longest of a batch has about two fifths of that. The mask keeps the result right, and
so nobody noticed that more than half of each batch is padding through all layers.
A good finding names the share of padding in the batches, and the line where they are padded (or the
batches).
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "every batch is padded to the model's longest sequence instead of the longest of the batch",
    "FIX": "pad to the longest sequence of the batch",
    "BATCH": 64,
    "CPU_BATCH": 8,
}
LONGEST, VOCAB, LABELS = by_device(512, 256), by_device(30_000, 1000), 5
WIDTH, LAYERS = by_device(512, 64), by_device(6, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, w // 64, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Reviews(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LABELS)

    def forward(self, ids, mask):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x) * mask.unsqueeze(-1)
        return self.head(x.sum(1) / mask.sum(1, keepdim=True))


def collate(texts, pad_to_all):
    """Return ids and mask of texts of several lengths."""
    longest = max(len(text) for text in texts)
    if pad_to_all:
        longest = LONGEST  # guilty
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    return ids, ids > 0


def build(pad_to_all):
    import steplab

    def batch(size):
        lengths = torch.randint(LONGEST // 16, LONGEST * 2 // 5, (size,)).tolist()
        texts = [torch.randint(1, VOCAB, (length,)) for length in lengths]
        ids, mask = collate(texts, pad_to_all)
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(LABELS, (size,))}

    def batches(size):
        ready = [batch(size) for _ in range(8)]
        while True:
            yield from ready

    def loss(model, batch):
        with mixed():
            scores = model(batch["input_ids"], batch["attention_mask"])
            return F.cross_entropy(scores, batch["labels"])

    return steplab.UserModel(Reviews(), batches, loss, optimizer=adamw)


def faulty():
    return build(pad_to_all=True)


def clean():
    return build(pad_to_all=False)

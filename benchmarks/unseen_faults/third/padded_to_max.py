"""The collate function pads every batch to the longest sequence that the model accepts, as
`padding="max_length"` does, although the texts are about an eighth of that.
A good finding names the share of padding among the tokens that are computed, and the line that
takes the padded length.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 12,
    "CAUSE": "batches are padded to the model's maximal length, so most tokens that the encoder computes are padding",
    "FIX": "pad to the longest sequence of the batch",
}
MAX_LENGTH, WIDTH, LAYERS, VOCAB, PAD = by_device(512, 256), by_device(768, 128), 2, 8000, 0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, WIDTH // 64, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = self.norm1(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH, padding_idx=PAD)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, input_ids, attention_mask):
        x = self.words(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.head(x[:, 0])


def to_max_length(texts):
    return MAX_LENGTH  # guilty


def to_longest(texts):
    return max(len(text) for text in texts)


def collate(texts, labels, padded_length):
    ids = torch.full((len(texts), padded_length), PAD)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    return {
        "input_ids": ids.to(device()),
        "attention_mask": (ids != PAD).to(device()),
        "labels": torch.tensor(labels, device=device()),
    }


def build(padded_length):
    my_turn()

    def batches(size):
        chance = torch.Generator().manual_seed(0)
        low, high = MAX_LENGTH // 16, MAX_LENGTH // 6
        while True:
            lengths = torch.randint(low, high, (size,), generator=chance).tolist()
            texts = [torch.randint(1, VOCAB, (n,), generator=chance) for n in lengths]
            labels = [n % 4 for n in lengths]
            yield collate(texts, labels, padded_length(texts))

    def loss(model, batch):
        with mixed():
            logits = model(batch["input_ids"], batch["attention_mask"])
        return F.cross_entropy(logits.float(), batch["labels"])

    return steplab.UserModel(Classifier(), batches, loss)


def faulty():
    return build(to_max_length)


def clean():
    return build(to_longest)

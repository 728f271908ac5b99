"""The collate function pads a batch of token lists by writing number after number into a tensor,
and the mask beside it.
A good finding names the assignments of single elements on the host, and the line of one of them.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "batches are padded by assigning single elements of a tensor in two nested Python loops",
    "FIX": "pad_sequence of tensors that were made once",
}
BATCH, LONGEST, WIDTH = by_device(256, 24), by_device(512, 128), by_device(1024, 80)
VOCAB, CLASSES, SAMPLES = by_device(32_000, 2000), 8, by_device(8192, 960)


def element_by_element(samples):
    longest = max(len(ids) for ids, _ in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros(len(samples), longest)
    for i, (ids, _) in enumerate(samples):
        for j, token in enumerate(ids):
            tokens[i, j] = token  # guilty
            mask[i, j] = 1
    return tokens, mask, torch.tensor([label for _, label in samples])


def at_once(samples):
    tokens = pad_sequence([ids for ids, _ in samples], batch_first=True)
    lengths = torch.tensor([len(ids) for ids, _ in samples])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).float()
    return tokens, mask, torch.tensor([label for _, label in samples])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids, mask):
        x = self.tokens(ids)
        x = x + self.feed(x)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def build(collate, ready):
    chance = torch.Generator().manual_seed(1)
    data = []
    for _ in range(SAMPLES):
        length = int(torch.randint(LONGEST // 4, LONGEST + 1, (), generator=chance))
        ids = torch.randint(1, VOCAB, (length,), generator=chance)
        data.append((ids if ready else ids.tolist(), int(ids[0]) % CLASSES))
    cuda = device() == "cuda"
    loader = DataLoader(data, BATCH, collate_fn=collate, drop_last=True, pin_memory=cuda)
    batches = iter(b for _ in iter(int, 1) for b in loader)
    model = Classifier().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        ids, mask, labels = (t.to(device(), non_blocking=True) for t in next(batches))
        with mixed():
            loss = F.cross_entropy(model(ids, mask), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(element_by_element, ready=False)


def clean():
    return build(at_once, ready=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)

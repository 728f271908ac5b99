"""A recurrent speech recognizer is trained with CTC on batches of utterances of about one length.
The collate function pads each batch to the longest utterance of the whole corpus, because then all
batches have one shape; most utterances are much shorter, and the network works on the padding.
A good finding names the padding to a fixed length beyond the batch's longest utterance (most frames are
padding) and the line in the collate function.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "batches are padded to the longest utterance of the corpus, not to their own longest",
    "FIX": "pad to the longest utterance of the batch",
}
BATCH, SIGNS, MELS = by_device(64, 8), by_device(64, 32), by_device(80, 40)
SHORT, LONG, SPREAD = by_device(100, 32), by_device(400, 80), by_device(20, 3)
STACK, WIDTH, LAYERS, LETTERS = 4, by_device(512, 96), by_device(4, 2), by_device(40, 6)


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(STACK * MELS, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.head = nn.Linear(WIDTH, SIGNS)

    def forward(self, frames):
        x, _ = self.memory(F.relu(self.start(frames.unflatten(1, (-1, STACK)).flatten(2))))
        return self.head(x)


def bucket():
    longest = int(torch.randint(SHORT, LONG + 1, ()))
    lengths = torch.randint(longest - SPREAD, longest + 1, (BATCH,)) * STACK
    return [(torch.randn(n, MELS), torch.randint(1, SIGNS, (LETTERS,))) for n in lengths.tolist()]


def length_for_all(lengths):
    return STACK * LONG  # guilty


def length_of_batch(lengths):
    return max(lengths)


def collate(utterances, padded_length):
    lengths = [len(frames) for frames, _ in utterances]
    batch = torch.zeros(len(utterances), padded_length(lengths), MELS)
    for row, (frames, _) in zip(batch, utterances, strict=True):
        row[: len(frames)] = frames
    letters = torch.stack([letters for _, letters in utterances])
    return batch, torch.tensor(lengths), letters


def build(padded_length):
    model = Recognizer().to(device())
    optimizer = adamw(model)
    data = in_turn(bucket)
    letter_counts = torch.full((BATCH,), LETTERS)

    def step():
        frames, lengths, letters = collate(next(data), padded_length)
        with mixed():
            scores = model(frames.to(device(), non_blocking=True))
        logs = scores.float().log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(logs, letters.to(device()), lengths // STACK, letter_counts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(length_for_all)


def clean():
    return build(length_of_batch)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)

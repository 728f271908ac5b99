"""Speech recognition with CTC: strided convolutions, a transformer. The CTC loss wants the number
of output frames, and the script runs the whole model on the batch first to look at the shape.
A good finding names the extra forward of which only the shape is used, and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole model runs once more on the batch only to learn the number of frames",
    "FIX": "take the number of frames from the shape of the log-probabilities that the loss uses",
}
BATCH, FRAMES, MELS, LETTERS = by_device(64, 8), by_device(1200, 160), 80, 32
WIDTH, LAYERS, SPOKEN = by_device(512, 128), by_device(6, 2), by_device(60, 10)


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(MELS, WIDTH, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(WIDTH, WIDTH, 5, stride=2, padding=2),
            nn.GELU(),
        )
        layer = nn.TransformerEncoderLayer(
            WIDTH, WIDTH // 32, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, mels):
        return self.head(self.encoder(self.front(mels).transpose(1, 2)))


def prepare():
    model = Recognizer().to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, MELS, FRAMES, device=device()),
            torch.randint(1, LETTERS, (BATCH, SPOKEN), device=device()),
        )
    )
    return model, adamw(model), data


def learn(logits, frames, text, optimizer):
    scores = F.log_softmax(logits.float(), -1).transpose(0, 1)
    loss = F.ctc_loss(scores, text, [frames] * BATCH, [SPOKEN] * BATCH)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()

    def step():
        mels, text = next(data)
        with mixed():
            frames = model(mels).shape[1]  # guilty
            logits = model(mels)
        return learn(logits, frames, text, optimizer)

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        mels, text = next(data)
        with mixed():
            logits = model(mels)
        return learn(logits, logits.shape[1], text, optimizer)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)

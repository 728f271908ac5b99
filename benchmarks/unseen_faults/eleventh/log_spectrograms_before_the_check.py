"""A speech enhancer is trained on waveforms. Every 500 steps the spectrograms of noisy, enhanced and
clean speech go to the log, but they are computed before the script looks whether it is time.
A good finding names the spectrograms that nothing uses in most steps, and the line that computes them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "spectrograms for the log are computed in every step although they are logged every 500 steps",
    "FIX": "compute the spectrograms inside the if that logs them",
}
BATCH, SAMPLES, EVERY = by_device(64, 8), by_device(32768, 8192), 500
WIDTH = by_device(128, 24)


class Enhancer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Conv1d(1, WIDTH, 16, stride=8, padding=4)
        self.blocks = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(4))
        self.decode = nn.ConvTranspose1d(WIDTH, 1, 16, stride=8, padding=4)

    def forward(self, waves):
        x = self.encode(waves.unsqueeze(1))
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.decode(x).squeeze(1)


def spectrograms(window, *signals):
    with torch.no_grad():
        spectra = torch.stft(torch.cat(signals), 512, 128, window=window, return_complex=True)
        return (spectra.abs() + 1e-5).log10().mul(20)


def prepare():
    torch.manual_seed(0)
    model = Enhancer().to(device())

    def pair():
        speech = torch.randn(BATCH, SAMPLES, device=device()).cumsum(1).mul(0.01).sin()
        return speech + 0.1 * torch.randn_like(speech), speech

    return model, adamw(model), in_turn(pair), torch.hann_window(512, device=device()), []


def learn(model, optimizer, noisy, speech):
    with mixed():
        enhanced = model(noisy)
    loss = F.l1_loss(enhanced.float(), speech)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), enhanced.detach().float()


def faulty():
    model, optimizer, data, window, log = prepare()
    count = 0

    def step():
        nonlocal count
        count += 1
        noisy, speech = next(data)
        loss, enhanced = learn(model, optimizer, noisy, speech)
        pictures = spectrograms(window, noisy, enhanced, speech)  # guilty
        if count % EVERY == 0:
            log.append(pictures.cpu())
        return loss

    return step


def clean():
    model, optimizer, data, window, log = prepare()
    count = 0

    def step():
        nonlocal count
        count += 1
        noisy, speech = next(data)
        loss, enhanced = learn(model, optimizer, noisy, speech)
        if count % EVERY == 0:
            log.append(spectrograms(window, noisy, enhanced, speech).cpu())
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)

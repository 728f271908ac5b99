"""A decoder whose embeddings are smoothed by a learned exponential moving average."""

import steplab
import torch
from torch import nn

from common import Block, adamw, my_turn, next_token_loss, pick, token_batches

FAULT = {
    "NAME": "decay_scan_in_python",
    "CAUSE": "The linear recurrence of the moving average is a Python loop over time, one small kernel after the other, forward and backward.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "The decays do not depend on the input, so the recurrence is a convolution with decay**t: one FFT each way (or a parallel scan).",
    "STYLE": "factory",
    "BATCH": 96,
    "WHY": "The loop over 128 points of time launches about a thousand tiny kernels that depend on each other; as a convolution by FFT the layer is a dozen launches.",
    "GAIN_MS": None,
}
WIDTH, LAYERS, HEADS = pick(1024, 32), pick(8, 1), pick(16, 2)
CONTEXT, VOCAB = pick(128, 16), pick(8192, 64)


class Smoothing(nn.Module):
    def __init__(self, in_loop):
        super().__init__()
        self.logit, self.in_loop = nn.Parameter(torch.linspace(-2, 3, WIDTH)), in_loop

    def forward(self, x):
        decay = self.logit.sigmoid()
        inputs = x * (1 - decay)
        if not self.in_loop:
            return self.convolve(inputs, decay)
        state, states = torch.zeros_like(x[:, 0]), []
        for now in inputs.unbind(1):
            state = torch.addcmul(now, decay, state)  # FAULT
            states.append(state)
        return torch.stack(states, 1)

    def convolve(self, inputs, decay):
        t = inputs.shape[1]
        kernel = decay[:, None] ** torch.arange(t, device=inputs.device)
        spectrum = torch.fft.rfft(inputs.transpose(1, 2), 2 * t) * torch.fft.rfft(kernel, 2 * t)
        return torch.fft.irfft(spectrum, 2 * t)[..., :t].transpose(1, 2).contiguous()


class Smoothed(nn.Module):
    def __init__(self, in_loop):
        super().__init__()
        self.tokens, self.smoothing = nn.Embedding(VOCAB, WIDTH), Smoothing(in_loop)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.smoothing(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(in_loop):
    torch.manual_seed(0)
    model = Smoothed(in_loop)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=next_token_loss,
        optimizer=adamw,
    )


def faulty():
    return make(in_loop=True)


def clean():
    return make(in_loop=False)

"""A variational autoencoder of small images once failed with "Trying to backward through the graph a
second time", and the first answer of the forum was taken: `retain_graph=True`. The cause is long
gone, the word is still there. The loop's variable `loss` lives until the next forward pass is done,
so all activations of the last step lie in memory beside those of this one.
A good finding names the activations that outlive their backward pass, and the line with retain_graph
or the variable that holds them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "backward(retain_graph=True) keeps the activations of a step alive until the next loss",
    "FIX": "leave retain_graph out: there is no second backward pass",
}
BATCH, SIDE = by_device(128, 20), by_device(128, 32)
WIDTH, LATENT = by_device(64, 32), by_device(256, 32)
LEFT = SIDE // 8


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(WIDTH, WIDTH, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(WIDTH, 2 * WIDTH, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(2 * WIDTH, 2 * WIDTH, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
        )
        self.latent = nn.Linear(2 * WIDTH * LEFT**2, 2 * LATENT)
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, 2 * WIDTH * LEFT**2),
            nn.Unflatten(1, (2 * WIDTH, LEFT, LEFT)),
            nn.ConvTranspose2d(2 * WIDTH, 2 * WIDTH, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(WIDTH, 3, 3, padding=1),
        )

    def forward(self, images):
        mean, spread = self.latent(self.encoder(images)).float().chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        again = self.decoder(code).float()
        prior = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1).mean()
        return F.mse_loss(again, images) + 1e-3 * prior


def losses(retain):
    model = VAE().to(device())
    optimizer = adamw(model)
    for images in in_turn(lambda: torch.rand(BATCH, 3, SIDE, SIDE, device=device())):
        with mixed():
            loss = model(images)
        if retain:
            loss.backward(retain_graph=True)  # guilty
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()


def build(retain):
    loop = losses(retain)
    return lambda: next(loop)


def faulty():
    return build(retain=True)


def clean():
    return build(retain=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)

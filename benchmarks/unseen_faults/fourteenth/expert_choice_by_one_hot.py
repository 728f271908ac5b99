"""A classifier of satellite images has layers in which the experts choose their patches: each takes
those that the router scores highest. As in the pseudocode of the paper, the choice becomes a
one-hot tensor (expert, place, patch), and the patches are fetched and put back by products with
it, although it has a single one per row. Indexing does the same without the products.
A good finding names the products with a one-hot tensor (a gather and a scatter written as a matrix
product) and one of the two lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "patches are fetched for the experts, and put back, by products with a one-hot tensor",
    "FIX": "fetch the patches by index_select and put them back by index_add",
}
BATCH, PATCHES, PIXELS = by_device(32, 4), by_device(256, 128), by_device(768, 192)
WIDTH, LAYERS, CLASSES = by_device(512, 64), by_device(6, 2), 45
EXPERTS, HIDDEN = 8, by_device(1024, 128)


class ExpertChoice(nn.Module):
    def __init__(self, one_hot):
        super().__init__()
        self.one_hot = one_hot
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.5 * HIDDEN**-0.5)

    def experts(self, taken):
        return F.gelu(taken @ self.up) @ self.down

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.router(flat).float().softmax(-1).T
        gates, chosen = scores.topk(len(flat) // EXPERTS)  # (expert, place)
        if self.one_hot:
            places = F.one_hot(chosen, len(flat)).to(flat.dtype)
            taken = torch.einsum("ept,td->epd", places, flat)  # guilty
            y = torch.einsum("ept,ep,epd->td", places, gates, self.experts(taken))
        else:
            taken = flat.index_select(0, chosen.flatten()).view(*chosen.shape, WIDTH)
            back = self.experts(taken) * gates[..., None]
            y = torch.zeros_like(flat).index_add(0, chosen.flatten(), back.flatten(0, 1))
        return y.view_as(x)


class Layer(nn.Module):
    def __init__(self, one_hot):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = ExpertChoice(one_hot)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, w // 64, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self, one_hot):
        super().__init__()
        self.patch = nn.Linear(PIXELS, WIDTH)
        self.place = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02)
        self.layers = nn.ModuleList(Layer(one_hot) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels):
        x = self.patch(pixels) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean(1)))


def build(one_hot):
    model = Classifier(one_hot).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, PATCHES, PIXELS, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )

    def step():
        pixels, labels = next(data)
        with mixed():
            loss = F.cross_entropy(model(pixels), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(one_hot=True)


def clean():
    return build(one_hot=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)

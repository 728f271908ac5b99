"""Photos are decoded from JPEG and cropped by the dataset, as usual, but the DataLoader was made
without num_workers: all of it runs in the training loop's own process, between two steps.
A good finding names the loading or decoding in the main process (or the missing workers), and the
line of the loader or of the decoding.
"""

import io

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the DataLoader has no workers, so images are decoded in the training process while the device waits",
    "FIX": "num_workers=4, with persistent_workers and prefetching",
}
BATCH, SIZE, PHOTO, PATCH = by_device(48, 8), by_device(224, 64), by_device(512, 512), 16
WIDTH, LAYERS, CLASSES = by_device(768, 192), by_device(12, 2), 100
TOKENS = (SIZE // PATCH) ** 2


class Photos(Dataset):
    """A hundred JPEG files in memory that stand for a large folder."""

    def __init__(self):
        draw = np.random.default_rng(0)
        self.files = []
        for _ in range(100):
            coarse = draw.integers(0, 256, (PHOTO // 8, PHOTO // 8, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(coarse).resize((PHOTO, PHOTO)).save(file, "JPEG", quality=92)
            self.files.append(file.getvalue())

    def __len__(self):
        return 200_000

    def __getitem__(self, i):
        image = Image.open(io.BytesIO(self.files[i % 100])).convert("RGB")
        left, top = i * 7 % (PHOTO - SIZE), i * 13 % (PHOTO - SIZE)
        image = image.crop((left, top, left + SIZE, top + SIZE))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), i % CLASSES


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, WIDTH // 64, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.embed(images.float() / 255 - 0.5).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x + self.positions).mean(1))


def build(loader):
    model = Model().to(device())
    optimizer, data = adamw(model), iter(loader)

    def step():
        images, labels = (v.to(device(), non_blocking=True) for v in next(data))
        with mixed():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(DataLoader(Photos(), BATCH, pin_memory=device() == "cuda"))  # guilty


def clean():
    loader = DataLoader(
        Photos(), BATCH, pin_memory=device() == "cuda", num_workers=4, prefetch_factor=4
    )
    return build(loader)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)

"""The progress line shows how much memory the process has to itself, which the kernel only tells as
a text about every mapping of the process; it is read and parsed after every step.
A good finding names the reading of a file on the host in every step, and the line that reads it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "/proc/self/smaps, a text about all mappings of the process, is read and parsed in every step",
    "FIX": "read it every few hundred steps, or take the resident size from /proc/self/statm",
}
BATCH, SIDE, WIDTH = by_device(128, 12), by_device(64, 32), by_device(128, 32)
EVERY = 500


def own_memory():
    total = 0
    with open("/proc/self/smaps") as file:
        for line in file:  # guilty
            if line.startswith(("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:")):
                total += int(line.split()[1])
    return total / 1024


def build(every):
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, 4 * WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, 10),
    ).to(device(), memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    images = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()).contiguous(
                memory_format=torch.channels_last
            ),
            torch.randint(10, (BATCH,), device=device()),
        )
    )
    log, done = {}, 0

    def step():
        nonlocal done
        x, y = next(images)
        with mixed():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done % every == 0:
            log["host_mib"] = own_memory()
        return loss.detach()

    return step


def faulty():
    return build(1)


def clean():
    return build(EVERY)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)

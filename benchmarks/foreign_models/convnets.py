"""Two image classifiers with batch norm: a plain stack, and residual blocks as torchvision has."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab


def conv(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Conv2d:
    """Return a convolution that keeps height and width unless it strides."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, which is projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = conv(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv_2, self.norm_2 = conv(outputs, outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                conv(inputs, outputs, stride, size=1), nn.BatchNorm2d(outputs)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the block's output, half as high and wide where it strides."""
        inner = self.relu(self.norm_1(self.conv_1(x_BCHW)))
        return self.relu(self.norm_2(self.conv_2(inner)) + self.shortcut(x_BCHW))


def residual_stack(width: int) -> nn.Module:
    """Return a stem, three stages of two blocks each, and a head."""
    stem = [conv(3, width, stride=2, size=7), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    stages, inputs = [], width
    for stage in range(3):
        outputs = width << stage
        first = ResidualBlock(inputs, outputs, 1 if stage == 0 else 2)
        stages.append(nn.Sequential(first, ResidualBlock(outputs, outputs, 1)))
        inputs = outputs
    pooled = [nn.MaxPool2d(3, 2, padding=1), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*stem, *pooled, nn.Linear(inputs, 10))


def plain_stack(width: int) -> nn.Module:
    """Return three layers of convolution, batch norm, ReLU and pooling, and a head."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [conv(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def plain(width: int = 16, pixels: int = 32) -> steplab.UserModel:
    """Convolution, batch norm, ReLU, three times, trained by SGD with momentum."""
    return _classifier(plain_stack(width), pixels)


def resnet(width: int = 16, pixels: int = 64) -> steplab.UserModel:
    """Six residual blocks in three stages, trained by SGD with momentum."""
    return _classifier(residual_stack(width), pixels)


def _classifier(network: nn.Module, pixels: int) -> steplab.UserModel:
    def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(0)
        while True:
            images = torch.randn(size, 3, pixels, pixels, generator=random)
            yield images, torch.randint(10, (size,), generator=random)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def optimizer(model: nn.Module, **how: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **how)

    return steplab.UserModel(network, batches, loss, optimizer=optimizer, unit="images")

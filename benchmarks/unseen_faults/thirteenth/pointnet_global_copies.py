"""A PointNet labels every point of a cloud from its own features and those of the whole cloud. The
features of the cloud are expanded to all points and concatenated with theirs, so a wide tensor of
mostly repeated numbers is written and kept for the backward. A linear layer of a concatenation is the
sum of two: one of the points, one of the clouds, which is computed once per cloud and broadcast.
A good finding names the concatenation with the expanded cloud features and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 192,
    "CPU_BATCH": 12,
    "CAUSE": "the features of each cloud are expanded to all its points, concatenated and kept for the backward",
    "FIX": "split the linear layer: apply one part to the points, one to the clouds, and add by broadcasting",
}
POINTS, LOCAL, GLOBAL, HIDDEN = (
    by_device(4096, 1024),
    by_device(128, 32),
    by_device(1024, 256),
    by_device(256, 64),
)
CLASSES = 13


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = nn.Sequential(
            nn.Linear(6, LOCAL), nn.ReLU(), nn.Linear(LOCAL, LOCAL), nn.ReLU()
        )
        self.wide = nn.Sequential(nn.Linear(LOCAL, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        self.lift = nn.Linear(HIDDEN, GLOBAL)
        self.mix = nn.Linear(LOCAL + GLOBAL, HIDDEN)
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def features(self, clouds):
        points = self.local(clouds)
        return points, self.lift(self.wide(points).amax(1))


class Concatenated(Model):
    def forward(self, clouds):
        points, cloud = self.features(clouds)
        both = torch.cat([points, cloud[:, None].expand(-1, POINTS, -1)], -1)  # guilty
        return self.head(F.relu(self.mix(both)))


class Split(Model):
    def forward(self, clouds):
        points, cloud = self.features(clouds)
        of_points, of_clouds = self.mix.weight.split([LOCAL, GLOBAL], 1)
        of_cloud = F.linear(cloud, of_clouds, self.mix.bias)
        return self.head(F.relu(F.linear(points, of_points) + of_cloud[:, None]))


def build(model):
    my_turn()

    def batch(size):
        clouds = torch.randn(size, POINTS, 6, device=device())
        return clouds, torch.randint(CLASSES, (size, POINTS), device=device())

    def loss(model, pair):
        with mixed():
            return F.cross_entropy(model(pair[0]).flatten(0, 1), pair[1].flatten())

    return steplab.UserModel(
        model(), lambda size: in_turn(lambda: batch(size), 4), loss, unit="clouds"
    )


def faulty():
    return build(Concatenated)


def clean():
    return build(Split)

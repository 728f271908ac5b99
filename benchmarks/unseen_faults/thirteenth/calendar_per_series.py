"""A forecaster adds vectors for the hour, the day of the week, the day of the month, the week, the
month and the holiday to its inputs. All series of a batch cover the same hours, yet the calendar is
expanded to all of them and every table is looked up for each series: large tensors forward, and a
sorted sum of all their gradients backward. One lookup per hour can be broadcast over the series.
A good finding names the lookups that are repeated for every series and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 256,
    "CPU_BATCH": 48,
    "CAUSE": "the calendar tables are looked up for every series of the batch although all series share the same hours",
    "FIX": "look up the calendar once per hour, and let the addition broadcast it over the series",
}
TIME, WIDTH, LAYERS, AHEAD = by_device(512, 168), by_device(512, 64), by_device(4, 1), 24
TABLES = [24, 7, 31, 53, 12, 2]


class Mixer(nn.Module):
    """A gated layer along the features."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(F.glu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(1, WIDTH)
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for rows in TABLES)
        self.layers = nn.Sequential(*[Mixer() for _ in range(LAYERS)])
        self.time, self.head = nn.Linear(TIME, AHEAD), nn.Linear(WIDTH, 1)

    def forward(self, values, calendar):
        x = self.layers(self.value(values[..., None]) + self.dates(calendar, len(values)))
        return self.head(self.time(x.transpose(1, 2)).transpose(1, 2)).squeeze(-1)


class PerSeries(Model):
    def dates(self, calendar, series):
        calendar = calendar.expand(series, -1, -1)
        return sum(table(calendar[..., i]) for i, table in enumerate(self.tables))  # guilty


class PerHour(Model):
    def dates(self, calendar, series):
        return sum(table(calendar[..., i]) for i, table in enumerate(self.tables))


def build(model):
    my_turn()

    def batch(size):
        calendar = torch.stack(
            [torch.randint(rows, (TIME,), device=device()) for rows in TABLES], -1
        )
        values, ahead = torch.randn(size, TIME + AHEAD, device=device()).split([TIME, AHEAD], 1)
        return values, calendar, ahead

    def loss(model, batch):
        with mixed():
            return F.mse_loss(model(*batch[:2]).float(), batch[2])

    return steplab.UserModel(
        model(), lambda size: in_turn(lambda: batch(size), 4), loss, unit="series"
    )


def faulty():
    return build(PerSeries)


def clean():
    return build(PerHour)

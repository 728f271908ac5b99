"""What an evaluation found: per group of series, over sets of groups, model beside naive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steplab.studies.evaluation.metrics import NAMES, Metrics, Sums, metrics, total


@dataclass(frozen=True)
class Group:
    """Series of one family or dataset."""

    name: str
    unseen: bool  # of a kind that training never has
    series: int
    windows: int
    without_scale: int  # windows whose seasonal error is 0 or unknown: they have no MASE
    model: Metrics
    naive: Metrics

    def ratio(self, metric: str) -> float:
        """Return model over seasonal naive; NaN where either is undefined or naive is 0."""
        return ratio(self.model, self.naive, metric)


@dataclass(frozen=True)
class Summary:
    """Several groups together, in two ways.

    `model` and `naive` are over all windows as if they were one group, so that groups with large
    errors count most. `geometric` is GIFT-Eval's way: the geometric mean over groups of the ratio
    to seasonal naive, in which every group counts the same.
    """

    name: str
    groups: int
    windows: int
    model: Metrics
    naive: Metrics
    geometric: dict[str, float]  # metric -> mean ratio; groups where it is undefined are left out
    won: dict[str, int]  # metric -> groups in which the model is better

    def ratio(self, metric: str) -> float:
        """Return model over seasonal naive, over all windows."""
        return ratio(self.model, self.naive, metric)


@dataclass(frozen=True)
class Evaluation:
    """One model on one set of series."""

    model: str
    data: str
    period: str  # where the periods of seasonal naive come from
    horizon: int
    windows: int  # per series, at most
    context: int  # points that the model saw, at most
    levels: tuple[float, ...]  # quantiles that WQL is the mean of; () for a point model
    left_out: int  # series without a window
    groups: tuple[Group, ...]
    summaries: tuple[Summary, ...]  # the last one is over all groups
    conditions: str = ""
    seconds: float = 0.0  # of forecasting

    @property
    def overall(self) -> Summary:
        """All groups together."""
        return self.summaries[-1]


@dataclass(frozen=True)
class Scored:
    """The sums of one window."""

    series: int
    group: str
    model: Sums
    naive: Sums


def ratio(model: Metrics, naive: Metrics, metric: str) -> float:
    """Return model over naive; NaN where either is undefined or naive is 0."""
    own, reference = model.by_name()[metric], naive.by_name()[metric]
    return own / reference if reference > 0 else math.nan


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of those that are not NaN; NaN where there is none."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    if min(known) == 0:
        return 0.0
    return math.exp(math.fsum(map(math.log, known)) / len(known))


def group_up(scored: Sequence[Scored], unseen: frozenset[str]) -> tuple[Group, ...]:
    """Return the groups by name in the order in which they first appear."""
    members: dict[str, list[Scored]] = {}
    for one in scored:
        members.setdefault(one.group, []).append(one)
    return tuple(
        Group(
            name=name,
            unseen=name in unseen,
            series=len({one.series for one in own}),
            windows=len(own),
            without_scale=sum(one.model.scaled_points == 0 for one in own),
            model=metrics(total(one.model for one in own)),
            naive=metrics(total(one.naive for one in own)),
        )
        for name, own in members.items()
    )


def summarise(name: str, scored: Sequence[Scored], groups: Sequence[Group]) -> Summary:
    """Return the summary over `groups`; `scored` may hold windows of other groups too."""
    names = {group.name for group in groups}
    own = [one for one in scored if one.group in names]
    ratios = {metric: [group.ratio(metric) for group in groups] for metric in NAMES}
    return Summary(
        name=name,
        groups=len(groups),
        windows=len(own),
        model=metrics(total(one.model for one in own)),
        naive=metrics(total(one.naive for one in own)),
        geometric={metric: geometric_mean(values) for metric, values in ratios.items()},
        won={metric: sum(value < 1 for value in values) for metric, values in ratios.items()},
    )


def summaries(scored: Sequence[Scored], groups: Sequence[Group]) -> tuple[Summary, ...]:
    """Return one over all groups; before it, where training saw only some, one over each kind."""
    seen = [group for group in groups if not group.unseen]
    unseen = [group for group in groups if group.unseen]
    parts = []
    if seen and unseen:
        parts.append(summarise("families trained on", scored, seen))
        parts.append(summarise("families never trained on", scored, unseen))
    return (*parts, summarise("all", scored, groups))

"""The gap between the losses of two recipes: its interval, the verdict, its price in tokens.

A pair is two trainings with the same first weights and the same data. Its gap is one sample; the
mean of the gaps and Student's interval say what the next pair would show. An undecided study goes
on with more pairs, so its intervals are as wide as it takes to look after every pair. No torch.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from steplab.compare.bootstrap import CONFIDENCE, student_quantile
from steplab.core import Column, Table
from steplab.core.errors import MeasurementError

LIMIT = 0.0025  # what fp8 trainings have been held to: 0.25 % of the reference's loss
FEWEST_PAIRS = 4  # three degrees of freedom: the interval is 6.6 standard errors to each side
# What 32 pairs leave open spreads by twice LIMIT. Each look more would widen all of them: up to 64
# pairs LOOK_CONFIDENCE would be 99.5 %.
MOST_PAIRS = 32
# Of one interval, so that those after 4, 5, ... 32 pairs all hold the true gap at CONFIDENCE: of
# 100,000 simulated studies some interval lay below it in 2.5 %, and above it in 2.5 %.
LOOK_CONFIDENCE = 0.993

GapVerdict = Literal["green", "unverified", "failed"]


@dataclass(frozen=True)
class Training:
    """What one training of a pair left: its validation losses, and how fast it was."""

    seed: int
    steps: tuple[int, ...]  # after which it was validated, rising
    losses: tuple[float, ...]  # the validation loss at each of them
    tokens_per_s: float | None
    reason: str = ""  # why it ended before its last step: it diverged

    @property
    def loss(self) -> float:
        """The last validation loss; infinite for a training that diverged."""
        return math.inf if self.reason or not self.losses else self.losses[-1]


@dataclass(frozen=True)
class Pair:
    """Two trainings that differ in their recipe alone."""

    reference: Training
    candidate: Training

    @property
    def gap(self) -> float:
        """How much higher the candidate's loss is, relative to the reference's (0.0025: 0.25 %)."""
        return self.candidate.loss / self.reference.loss - 1


@dataclass(frozen=True)
class GapInterval:
    """The mean gap of the pairs with Student's interval at LOOK_CONFIDENCE."""

    mean: float
    low: float
    high: float

    def verdict(self, limit: float) -> GapVerdict:
        """`green`: at most `limit`; `failed`: more than it; `unverified`: too wide to say."""
        if self.high <= limit:
            return "green"
        return "failed" if self.low > limit else "unverified"

    @property
    def words(self) -> str:
        """`+0.02 % (95 % interval over all looks -0.05 to +0.09 %)`."""
        sure = f"{CONFIDENCE:.0%}".replace("%", " %")
        return (
            f"{self.mean * 100:+.3g} % ({sure} interval over all looks {self.low * 100:+.3g} "
            f"to {self.high * 100:+.3g} %)"
        )


def gap_interval(gaps: Sequence[float]) -> GapInterval:
    """Return the mean of the gaps and its interval; all infinite where a candidate diverged.

    On a logarithmic scale, which is the same for small gaps; large ones are ratios, and spread so.
    """
    if not all(map(math.isfinite, gaps)):
        return GapInterval(math.inf, math.inf, math.inf)
    logs = [math.log1p(gap) for gap in gaps]
    mean, count = statistics.fmean(logs), len(logs)
    error = statistics.stdev(logs) / math.sqrt(count)
    half = student_quantile(count - 1, LOOK_CONFIDENCE) * error
    return GapInterval(*(math.expm1(x) for x in (mean, mean - half, mean + half)))


def pairs_to_decide(gaps: Sequence[float], limit: float) -> int | None:
    """Return about how many pairs would decide, if they spread as these do; None: too many."""
    spread, distance = statistics.stdev(gaps), abs(limit - statistics.fmean(gaps))

    def decide(count: int) -> bool:
        quantile = student_quantile(count - 1, LOOK_CONFIDENCE)
        return quantile * spread / math.sqrt(count) <= distance

    counts = range(len(gaps) + 1, MOST_PAIRS + 1)
    index = bisect.bisect_left(counts, True, key=decide)
    return counts[index] if index < len(counts) else None


def share_of_tokens(pairs: Sequence[Pair]) -> float:
    """Return the share of its tokens after which the reference has the candidate's final loss.

    By the mean validation losses of all pairs, with straight lines between the validations; 1 where
    the reference does not get there before its end. The reference's rate decays toward its own end:
    a shorter training of it would get there earlier still.
    """
    steps = pairs[0].reference.steps
    losses_PS = [pair.reference.losses for pair in pairs]
    curve = [statistics.fmean(losses) for losses in zip(*losses_PS, strict=True)]
    target = statistics.fmean(pair.candidate.loss for pair in pairs)
    if curve[0] <= target:
        return steps[0] / steps[-1]
    for i in range(1, len(curve)):
        if curve[i] <= target:
            part = (curve[i - 1] - target) / (curve[i - 1] - curve[i])
            return (steps[i - 1] + part * (steps[i] - steps[i - 1])) / steps[-1]
    return 1.0


@dataclass(frozen=True)
class LossGap:
    """What the pairs say of two recipes."""

    reference: str  # the recipes, as they are written
    candidate: str
    pairs: tuple[Pair, ...]
    limit: float

    def __post_init__(self) -> None:
        for pair in self.pairs:
            if not 0 < pair.reference.loss < math.inf:
                why = pair.reference.reason or f"its loss is {pair.reference.loss:g}"
                raise MeasurementError(
                    f"The reference {self.reference} with seed {pair.reference.seed} is nothing to "
                    f"compare with: {why}"
                )

    @property
    def gaps(self) -> list[float]:
        """The gap of every pair."""
        return [pair.gap for pair in self.pairs]

    @property
    def interval(self) -> GapInterval:
        """Their mean and its interval."""
        return gap_interval(self.gaps)

    @property
    def verdict(self) -> GapVerdict:
        """What the interval allows to be said."""
        return self.interval.verdict(self.limit)

    @property
    def sentence(self) -> str:
        """The verdict with its reason, and what to do about it."""
        diverged = [pair.candidate for pair in self.pairs if pair.candidate.reason]
        if diverged:
            return f"failed: {self.candidate}, seed {diverged[0].seed}: {diverged[0].reason}"
        allowed = f"{self.limit * 100:g} %"
        steps = f"{self.pairs[0].reference.steps[-1]:,} steps"
        found = (
            f"after {steps} the loss of {self.candidate} differs from {self.reference}'s by "
            f"{self.interval.words}"
        )
        if self.verdict == "green":
            return f"green: {found}, at most {allowed}"
        if self.verdict == "failed":
            return f"failed: {found}, more than {allowed}"
        needed = pairs_to_decide(self.gaps, self.limit)
        more = f"about --pairs {needed} would decide" if needed else "train longer, or on more data"
        return f"unverified: {found}, on both sides of {allowed}; {more}"

    def tokens_per_s(self, side: Literal["reference", "candidate"]) -> float | None:
        """Return the median rate of the trainings of one recipe; None where it is not known."""
        rates = [getattr(pair, side).tokens_per_s for pair in self.pairs]
        known = [rate for rate in rates if rate]
        return statistics.median(known) if known else None

    def loss_matched_tokens_per_s(self) -> float | None:
        """Return the candidate's rate, less the tokens that its worse loss has cost.

        Tokens per second, times the tokens that the reference needs for the candidate's final loss,
        over those that the candidate needed.
        """
        rate = self.tokens_per_s("candidate")
        if rate is None or any(pair.candidate.reason for pair in self.pairs):
            return None
        return rate * share_of_tokens(self.pairs)

    def metrics(self) -> dict[str, float]:
        """Return the figures by name, for the record."""
        interval = self.interval
        found = {
            "gap": interval.mean,
            "gap_low": interval.low,
            "gap_high": interval.high,
            "limit": self.limit,
            "reference_loss": statistics.fmean(pair.reference.loss for pair in self.pairs),
            "loss": statistics.fmean(pair.candidate.loss for pair in self.pairs),
            "reference_tokens_per_s": self.tokens_per_s("reference"),
            "tokens_per_s": self.tokens_per_s("candidate"),
            "loss_matched_tokens_per_s": self.loss_matched_tokens_per_s(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def pair_table(self) -> Table:
        """One row per pair."""
        columns = (
            Column("seed"),
            Column(f"loss of {self.reference}", digits=5),
            Column(f"loss of {self.candidate}", digits=5),
            Column("gap", "%", 3),
        )
        rows = tuple(
            (pair.reference.seed, pair.reference.loss, pair.candidate.loss, pair.gap * 100)
            for pair in self.pairs
        )
        return Table("validation loss at the end of each training", columns, rows, self.sentence)

    def recipe_table(self) -> Table:
        """One row per recipe: its loss, its speed, and its speed at equal loss."""
        columns = (
            Column("recipe"),
            Column("mean loss", digits=5),
            Column("tokens/s"),
            Column("loss-matched tokens/s"),
        )
        figures = self.metrics()
        own = figures.get("reference_tokens_per_s")
        rows = (
            (self.reference, figures["reference_loss"], own, own),
            (
                self.candidate,
                figures["loss"],
                figures.get("tokens_per_s"),
                figures.get("loss_matched_tokens_per_s"),
            ),
        )
        note = (
            "loss-matched: tokens/s times the tokens that the reference needs for the same final "
            "loss over those of the recipe"
        )
        return Table("speed at equal loss", columns, rows, note)

    def curve_table(self) -> Table:
        """The mean validation losses of both recipes after so many steps."""
        names = ("step", f"loss of {self.reference}", f"loss of {self.candidate}")
        finished = [pair for pair in self.pairs if not pair.candidate.reason]
        rows = tuple(
            (
                step,
                statistics.fmean(pair.reference.losses[i] for pair in finished),
                statistics.fmean(pair.candidate.losses[i] for pair in finished),
            )
            for i, step in enumerate(finished[0].reference.steps if finished else ())
        )
        return Table("mean validation loss", tuple(map(Column, names)), rows)

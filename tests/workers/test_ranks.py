"""Groups of ranks: one call, one answer; and what happens to the others when one is lost."""

import signal
import threading
from time import monotonic

import pytest

from steplab.core import Environment, Run, Samples
from steplab.core.errors import MeasurementError, Unsupported
from steplab.techniques.recipes import parse_recipe
from steplab.workers import ranks
from steplab.workers.client import WorkerLost
from steplab.workers.ranks import PerRank, RankGroup
from steplab.workers.trials import TrialRunner

pytestmark = pytest.mark.usefixtures("tests_are_importable")
ENVIRONMENT = Environment("0", "3.11", "Linux", "cpu", 2, None)
SERVED = "tests.workers.served"


@pytest.fixture(scope="module")
def group(tests_are_importable):
    with RankGroup(2, "cpu") as two:
        yield two


def test_ranks_have_joined_one_group(group):
    assert group.call(f"{SERVED}:sum_of_ranks", float, timeout=60) == 1.0


def test_samples_are_those_of_the_slowest(group):
    factors = PerRank([1.0, 3.0])
    options = {"samples": Samples((1.0, 2.0), "ms"), "factor": factors}
    found = group.call(f"{SERVED}:scaled", Samples, timeout=60, **options)
    assert found.values == (3.0, 6.0)


def test_an_object_is_kept_in_every_rank(group):
    group.keep(f"{SERVED}:RankCounter", timeout=60, start=10)
    assert group.call(".sum", float, timeout=60) == 21.0  # 10 + 0 and 10 + 1


def test_a_refusal_names_its_rank(group):
    with pytest.raises(Unsupported, match=r"rank [01]: no such thing"):
        group.call(f"{SERVED}:refuse", type(None), timeout=60, reason="no such thing")


def test_a_rank_that_fails_ends_the_wait_of_the_others(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)
    with RankGroup(2, "cpu") as two:
        begun = monotonic()
        with pytest.raises(MeasurementError, match="rank 1: ZeroDivisionError"):
            two.call(f"{SERVED}:one_rank_fails", float, timeout=300)
        assert monotonic() - begun < 100  # not the 300 that it might take
        assert not two.is_alive


def test_a_rank_that_is_killed_is_named(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)
    killed = pytest.raises(WorkerLost, match="rank 1: the worker was ended by SIGKILL")
    with RankGroup(2, "cpu") as two, killed:
        two.call(f"{SERVED}:one_rank_tells", Run, timeout=300, fate="die")


def test_a_rank_that_is_lost_is_named_before_those_that_noticed_it_first(monkeypatch):
    """On a busy machine its end is noticed after all patience, when the others are ended."""
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.2)

    class Noticing:
        """A rank that fails because of the other, or that has been killed and tells it late."""

        def __init__(self, lost: bool) -> None:
            self.is_alive, self.ended = not lost, threading.Event()

        def receive(self, returns: object, **how: object) -> None:
            if self.is_alive:
                raise MeasurementError("connection closed by peer")
            self.ended.wait(60)
            raise WorkerLost("failed", "the worker was ended by SIGKILL")

        def end(self) -> None:
            self.ended.set()

    group = RankGroup.__new__(RankGroup)
    group.workers = [Noticing(lost=False), Noticing(lost=True)]
    with pytest.raises(WorkerLost, match="rank 1: the worker was ended by SIGKILL"):
        group._answers(Run, 300, lambda text: None)


def test_a_rank_that_says_what_went_wrong_is_heard_also_where_the_others_are_lost(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)
    with RankGroup(2, "cpu") as two:
        run = two.call(f"{SERVED}:one_rank_tells", Run, timeout=300, fate="tell")
    assert (run.status, run.reason) == ("oom", "rank 1: no memory")


def test_a_group_that_takes_too_long_says_so_and_ctrl_c_ends_it_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    forever, main_thread = f"{SERVED}:wait_for_ever", threading.get_ident()
    with RankGroup(2, "cpu") as two:
        with pytest.raises(WorkerLost, match=r"no answer within 0\.2 s") as lost:
            two.call(forever, type(None), timeout=0.2)
        assert lost.value.status == "timeout" and two.is_alive
        begun = monotonic()
        threading.Timer(0.2, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            two.call(forever, type(None), timeout=600)
        assert monotonic() - begun < 100
    assert not two.is_alive and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_shared_step_is_measured_and_a_dead_rank_is_a_row(fated):
    recipe = parse_recipe("parallel=naive")
    with TrialRunner(timeout=120) as trials:
        alone = trials.trial(fated("live"), ENVIRONMENT, "key")
        shared = trials.trial(fated("live", ranks=2, recipe=recipe), ENVIRONMENT, "key")
        dead = trials.trial(fated("die", ranks=2, recipe=recipe), ENVIRONMENT, "key")
    assert shared.status == "ok", shared.reason
    assert len(shared.ranks) == 2 and shared.work.tokens == 2 * alone.work.tokens
    assert dead.status == "crashed" and "SIGKILL" in dead.reason

import pytest

from steplab.codec import decode, encode
from steplab.engine.profiling.plan import Plan
from steplab.errors import UserError


def test_steps_are_whole_cycles():
    assert Plan((2, 3, 3, 2)).steps == 16
    assert Plan((0, 0, 1, 1)).steps == 1


def test_a_plan_goes_through_json():
    plan = Plan((2, 3, 3, 2), detail=False)
    assert decode(Plan, encode(plan)) == plan


@pytest.mark.parametrize(
    "schedule", [(1, 2, 3), (-1, 0, 1, 1), (0, -1, 1, 1), (0, 0, 0, 1), (0, 0, 1, 0)]
)
def test_a_schedule_that_records_nothing_is_refused(schedule):
    with pytest.raises(UserError):
        Plan(schedule)

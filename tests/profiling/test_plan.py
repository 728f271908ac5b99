import pytest

from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.profiling.plan import ProfilePlan


def test_steps_are_whole_cycles():
    assert ProfilePlan((2, 3, 3, 2)).steps == 16
    assert ProfilePlan((0, 0, 1, 1)).steps == 1


def test_a_plan_goes_through_json():
    plan = ProfilePlan((2, 3, 3, 2), detail=False)
    assert decode(ProfilePlan, encode(plan)) == plan


@pytest.mark.parametrize(
    "schedule", [(1, 2, 3), (-1, 0, 1, 1), (0, -1, 1, 1), (0, 0, 0, 1), (0, 0, 1, 0)]
)
def test_a_schedule_that_records_nothing_is_refused(schedule):
    with pytest.raises(UserError):
        ProfilePlan(schedule)

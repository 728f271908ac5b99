"""What a misspelled word is answered with."""

import pytest

from steplab.core.errors import did_you_mean

FLAGS = ("--dataset-path", "--device", "--d-ff", "--log-every", "--log-perf-metrics", "--k")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--devise", "Did you mean '--device'?"),
        ("--data", "Did you mean '--dataset-path'?"),  # it begins like one flag only
        ("--log", "Known: "),  # like two
        ("--d", "Known: "),
        ("--xyz", "Known: "),
    ],
)
def test_a_near_word_or_the_only_one_that_begins_alike_is_meant(word, said):
    assert did_you_mean(word, FLAGS).startswith(said)


def test_nothing_is_known():
    assert did_you_mean("word", ()) == "None is known."

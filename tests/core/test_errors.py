"""What a misspelled word is answered with."""

import pytest

from steplab.core.errors import did_you_mean

FLAGS = (
    *("--dataset-path", "--device", "--d-ff", "--log-every", "--log-perf-metrics", "--k"),
    *("--steps-per-epoch", "--store"),
)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--devise", "Did you mean '--device'?"),
        ("--data", "Did you mean '--dataset-path'?"),  # it begins like one flag only
        ("--steps", "Did you mean '--steps-per-epoch'?"),  # not --store
        ("--log", "Known: "),  # like two
        ("--d", "Known: "),
        ("--xyz", "Known: "),
    ],
)
def test_a_near_word_or_the_only_one_that_begins_alike_is_meant(word, said):
    assert did_you_mean(word, FLAGS).startswith(said)


def test_words_that_only_share_letters_are_not_meant():
    assert did_you_mean("--steps", ("--tiles", "--store")).startswith("Known: ")


def test_nothing_is_known():
    assert did_you_mean("word", ()) == "None is known."

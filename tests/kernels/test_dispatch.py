"""Ask and get, or be told no."""

import inspect
from types import SimpleNamespace

import pytest

from steplab.core.errors import Unsupported, UserError
from steplab.kernels.dispatch import impls, load, needs_gpu, ops, select, worth_trying


def implementation(most):
    """Return an implementation that takes numbers up to `most`."""
    return SimpleNamespace(refuse=lambda x: f"needs at most {most}, not {x}" if x > most else "")


# An implementation without `refuse` takes everything.
IMPLS = {"small": implementation(1), "medium": implementation(10), "any": SimpleNamespace()}
PREFERENCE = ("small", "medium", "any")


@pytest.mark.parametrize(("x", "chosen"), [(1, "small"), (5, "medium"), (100, "any")])
def test_auto_is_the_first_that_accepts(x, chosen):
    assert select("counting", IMPLS, PREFERENCE, "auto", x) == chosen


def test_what_is_asked_for_runs_or_says_why_not():
    assert select("counting", IMPLS, PREFERENCE, "any", 10**9) == "any"
    with pytest.raises(Unsupported, match="counting 'small' needs at most 1, not 2") as error:
        select("counting", IMPLS, PREFERENCE, "small", 2)
    assert "impl.counting=auto" in error.value.suggestion


def test_an_unknown_name_is_an_error_with_a_suggestion():
    with pytest.raises(UserError, match="counting has no implementation 'medum'") as error:
        select("counting", IMPLS, PREFERENCE, "medum", 1)
    assert "medium" in error.value.suggestion


def test_what_is_there_to_be_measured_against_is_not_tried():
    assert not worth_trying("attention", "dense_mask")
    assert not worth_trying("attention", "tiled") and worth_trying("attention", "math")
    assert not worth_trying("experts", "capacity")
    assert worth_trying("experts", "loop")


@pytest.mark.parametrize("op", ops())
def test_what_refuses_any_cpu_says_so_without_being_imported(op):
    words = (
        "refuse_device(",
        "refuse_rows(",
        "refuse_gluon(",
        "needs an NVIDIA GPU",
        "needs cuda, not",
    )
    for impl in impls(op):
        refuse = getattr(load(op, impl), "refuse", None)
        refuses = refuse is not None and any(w in inspect.getsource(refuse) for w in words)
        assert needs_gpu(op, impl) is refuses, impl

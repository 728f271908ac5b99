"""Short pieces packed into windows: nothing lost, nothing twice, nothing over an edge."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import UserError
from steplab.data.loader import Batch, Loader, PackedBatch
from steplab.data.packing import PADDING, PackedWindows, pack_pieces, piece_lengths, window_stats
from steplab.data.sampling import Position
from steplab.data.windows import Windows

from .stubs import ListSeries


def series_of(lengths):
    """Series that tell, in every point, which series and which place it is."""
    return ListSeries([1000 * (i + 1) + np.arange(n) for i, n in enumerate(lengths)])


def best_fit(lengths, window, patch):
    """The definition, piece by piece: the room that is left in every window."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(window)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=lambda i: rooms[i])] -= -(-length // patch) * patch
    return sorted(rooms)


shapes = st.tuples(
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.integers(1, 6),  # tokens
    st.sampled_from([1, 4]),  # points per token
    st.sampled_from([0, 1, 3, 50]),  # stride; 0: as long as the tokens
).filter(lambda shape: max(shape[0]) >= 2)


def build(shape, normalize="none"):
    lengths, tokens, patch, stride = shape
    length = 2 * tokens * patch + 1
    return PackedWindows(series_of(lengths), length, stride or length - 1, normalize, patch)


@settings(max_examples=150, deadline=None)
@given(shapes)
def test_lengths_are_packed_as_pieces_would_be(shape):
    lengths, tokens, patch, _ = shape
    window = 2 * tokens * patch + 1
    short = [n for n in lengths if 2 <= n <= window]
    groups = pack_pieces(np.bincount(short, minlength=1), window, patch)
    rooms = sorted(group.room for group in groups for _ in range(group.windows))
    assert rooms == best_fit(short, window, patch)
    if patch == 1:
        assert sum(2 * room >= window for room in rooms) <= 1  # two such would be one


@settings(max_examples=150, deadline=None)
@given(shapes)
def test_every_piece_lies_in_one_place(shape):
    windows = build(shape)
    lengths, _, patch, _ = shape
    found, targets = [], []
    for number in range(len(windows)):
        end = 0
        for series, start, stop, place in windows.pieces(number):
            assert place >= end and place % patch == 0
            end = place + stop - start
            assert end <= windows.length
            found.append((series, start))
            targets += [(series, point) for point in range(start + 1, stop)]
    assert len(set(found)) == len(found)
    if windows.stride == windows.length - 1:
        # Then every point but the first of a series is the next point of exactly one token.
        wanted = [(i, p) for i, n in enumerate(lengths) for p in range(1, n)]
        assert sorted(targets) == wanted


@settings(max_examples=80, deadline=None)
@given(shapes)
def test_windows_hold_their_pieces(shape):
    windows = build(shape)
    for number in range(len(windows)):
        values, mask, documents = windows.read(number)
        assert (values.dtype, mask.dtype, documents.dtype) == (np.float32, np.bool_, np.int32)
        pieces = list(windows.pieces(number))
        assert documents.max() == len(pieces) - 1
        for document, (series, start, stop, place) in enumerate(pieces):
            expected = 1000 * (series + 1) + np.arange(start, stop)
            inside = slice(place, place + stop - start)
            assert (values[inside] == expected).all() and mask[inside].all()
            assert (documents[inside] == document).all()
        assert mask.sum() == sum(stop - start for _, start, stop, _ in pieces)
        assert not values[~mask].any()
        patch = windows.patch_length
        of_token = documents[:-1].reshape(-1, patch)
        assert (of_token == of_token[:, :1]).all()


@settings(max_examples=100, deadline=None)
@given(shapes)
def test_filling_is_what_the_windows_hold(shape):
    lengths, _, patch, _ = shape
    packed = build(shape)
    plain = Windows(packed.series, packed.length, packed.stride, "none")
    for windows, is_packed in ((packed, True), (plain, False)):
        stats = window_stats(packed.series.lengths, packed.length, packed.stride, patch, is_packed)
        masks, used = [], set()
        for number in range(len(windows)):
            values, mask = windows.read(number)[:2]
            masks.append(mask)
            used |= set(values[mask].tolist())
        assert stats.windows == len(windows)
        assert stats.padding == pytest.approx(1 - np.mean(masks))
        assert stats.unused == pytest.approx(1 - len(used) / sum(lengths))


def test_tails_are_what_follows_the_last_full_window():
    lengths = np.array([0, 1, 2, 8, 9, 10, 17, 18, 25])
    assert piece_lengths(lengths, 9, 8).tolist() == [0, 0, 2, 8, 0, 2, 0, 2, 0]
    assert piece_lengths(lengths, 9, 1).tolist() == [0, 0, 2, 8, 0, 0, 0, 0, 0]
    assert piece_lengths(lengths, 9, 12).tolist() == [0, 0, 2, 8, 0, 0, 5, 6, 0]


def test_packing_wastes_little():
    lengths = np.random.default_rng(0).integers(20, 256, 5000)
    plain, packed = (window_stats(lengths, 257, 256, 1, kind) for kind in (False, True))
    assert plain.padding > 0.4 and packed.padding < 0.01
    assert packed.windows < 0.6 * plain.windows
    assert str(packed).startswith("windows=2,")


def test_many_pieces_are_few_groups():
    lengths = np.random.default_rng(0).integers(2, 1025, 300_000)
    groups = pack_pieces(np.bincount(lengths), 1025, 1)
    assert len(groups) < 5_000
    pieces = [run.each * group.windows for group in groups for run in group.runs]
    assert sum(pieces) == len(lengths)


def test_pieces_that_are_not_finite_are_padding():
    nan = np.nan
    series = ListSeries([[1, 2, 3], [nan, nan, 4], [5, nan, 7], [8, 9]])
    windows = PackedWindows(series, 11, 10, "none")
    values, mask, documents = windows.read(0)
    assert values.tolist() == [1, 2, 3, 0, 0, 0, 5, 0, 7, 8, 9]
    assert mask.tolist() == [True] * 3 + [False] * 3 + [True, False, True, True, True]
    assert documents.tolist() == [0] * 3 + [PADDING] * 3 + [1] * 3 + [2] * 2


def test_windows_without_finite_points_are_replaced():
    series = ListSeries([[np.nan] * 4, [1, 2, 3, 4], [np.nan] * 9])
    windows = PackedWindows(series, 5, 4)
    reads = [windows.read(number) for number in range(len(windows))]
    assert len(windows) == 4 and all(mask.sum() == 4 for _, mask, _ in reads)
    assert windows.skipped == {"fewer than 2 points": 0, "fewer than 2 finite points": 2}
    nothing = PackedWindows(ListSeries([[np.nan] * 4]), 5, 4)
    with pytest.raises(UserError, match="no window with 2 finite points"):
        nothing.read(0)


def test_series_without_windows_are_refused():
    with pytest.raises(UserError, match="no series with 2 points"):
        PackedWindows(series_of([1, 0]), 5, 4)
    with pytest.raises(UserError, match="not possible"):
        PackedWindows(series_of([9]), 1, 4)
    for outside in (-1, 1):
        with pytest.raises(IndexError):
            PackedWindows(series_of([3]), 5, 4).read(outside)


def test_every_series_is_scaled_by_itself():
    series = ListSeries([np.arange(6) * 10.0, np.arange(5) + 100.0])
    values, _, documents = PackedWindows(series, 11, 10).read(0)
    for document in (0, 1):
        points = values[documents == document]
        assert points.mean() == pytest.approx(0, abs=1e-6)
        assert points.std() == pytest.approx(1, rel=1e-6)


def test_a_loader_resumes_at_any_place():
    windows = PackedWindows(series_of(np.random.default_rng(1).integers(2, 60, 200)), 33, 32)
    with Loader(windows, 4, 7, "cpu") as loader:
        batches = [next(loader) for _ in range(12)]
        end = loader.position
    assert isinstance(batches[0], PackedBatch) and batches[0].documents_BT.dtype == torch.int32
    again = PackedWindows(windows.series, 33, 32)
    with Loader(again, 4, 7, "cpu", position=Position(end.epoch, end.index - 20)) as loader:
        for batch in batches[7:]:
            for one, other in zip(batch, next(loader), strict=True):
                assert torch.equal(one, other)


def test_a_loader_of_plain_windows_has_no_documents():
    with Loader(Windows(series_of([50]), 5, 4), 2, 0, "cpu") as loader:
        assert type(next(loader)) is Batch

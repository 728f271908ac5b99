import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from steplab.core.errors import UserError
from steplab.data.formats import open_series
from steplab.data.formats.time300b import write_time300b
from steplab.data.loader import Loader
from steplab.data.sampling import Order, Position
from steplab.data.windows import Windows

from .stubs import ListSeries


def numbered(count):
    """Windows that tell their number in their first value."""
    return Windows(ListSeries([[i, 0] for i in range(count)]), 2, 2, "none")


def take(loader, batches):
    return [next(loader).values_BT[:, 0].int().tolist() for _ in range(batches)]


def data_threads():
    return [t for t in threading.enumerate() if t.name.startswith("steplab-data")]


def gone(patience_s=10.0):
    """Whether all threads of loaders have ended; they need a moment to wake up."""
    end = time.monotonic() + patience_s
    while data_threads() and time.monotonic() < end:
        time.sleep(0.01)
    return not data_threads()


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_order_is_the_seeds_whatever_the_threads(workers):
    class Uneven(ListSeries):
        def read(self, index, start, stop):
            time.sleep(0.002 * (index % 3))
            return super().read(index, start, stop)

    windows = Windows(Uneven([[i, 0] for i in range(23)]), 2, 2, "none")
    with Loader(windows, 5, 11, "cpu", prefetch=3, workers=workers) as loader:
        got = take(loader, 9)
    expected = [Order(23, 11, e)[np.arange(b * 5, b * 5 + 5)] for e in range(3) for b in range(4)]
    assert got == [numbers.tolist() for numbers in expected[:9]]


def test_batches_are_tensors_of_windows():
    windows = Windows(ListSeries([[1, 2, np.nan, 4], [5, 6]]), 6, 6, "none")
    with Loader(windows, 2, 0, "cpu", shuffle=False) as loader:
        values_BT, mask_BT = next(loader)
    assert values_BT.dtype == torch.float32 and mask_BT.dtype == torch.bool
    assert values_BT.tolist() == [[1, 2, 0, 4, 0, 0], [5, 6, 0, 0, 0, 0]]
    assert mask_BT.sum(1).tolist() == [3, 2]


def test_an_epoch_drops_its_last_incomplete_batch():
    with Loader(numbered(7), 3, 0, "cpu", shuffle=False) as loader:
        assert take(loader, 3) == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


@pytest.mark.parametrize("consumed", [0, 1, 3, 4, 5, 11])
def test_a_saved_position_continues_exactly(consumed):
    with Loader(numbered(22), 5, 3, "cpu") as whole:
        everything = take(whole, 16)
    with Loader(numbered(22), 5, 3, "cpu", prefetch=4) as first:
        head, position = take(first, consumed), first.position
    assert position == Position(
        max(consumed - 1, 0) // 4, 0 if not consumed else (consumed - 1) % 4 * 5 + 5
    )
    with Loader(numbered(22), 5, 3, "cpu", position, prefetch=1, workers=1) as second:
        assert head + take(second, 16 - consumed) == everything


def test_position_is_what_was_received_and_not_what_was_read():
    with Loader(numbered(100), 5, 0, "cpu", prefetch=6) as loader:
        assert loader.position == Position(0, 0)
        next(loader)
        time.sleep(0.05)
        assert loader.position == Position(0, 5)
    assert loader.position == Position(0, 5)


def test_read_ahead_is_bounded():
    series = ListSeries([[i, 0] for i in range(1000)])
    with Loader(Windows(series, 2, 2, "none"), 2, 0, "cpu", prefetch=3) as loader:
        for _ in range(5):
            next(loader)
        time.sleep(0.1)
        assert series.points_read <= (5 + 3) * 2 * 2


def test_a_fault_in_a_thread_arrives_as_a_sentence_and_ends_the_threads():
    class Broken(ListSeries):
        def read(self, index, start, stop):
            if index == 7:
                raise RuntimeError("bad sector")
            return super().read(index, start, stop)

    windows = Windows(Broken([[i, 0] for i in range(9)], "disk.bin"), 2, 2, "none")
    loader = Loader(windows, 3, 0, "cpu", shuffle=False)
    assert take(loader, 2) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(UserError, match=r"disk\.bin: series 7 .*bad sector"):
        next(loader)
    assert loader.position == Position(0, 6) and gone()
    with pytest.raises(UserError, match="closed"):
        next(loader)


def test_a_file_cut_before_the_threads_start(tmp_path):
    """Opened whole, cut, then loaded. Cut while a thread reads, it may end the process: the size
    is checked before each access, and no check can stand inside the access itself."""
    write_time300b(tmp_path / "x", [np.arange(50_000, dtype=np.float32)])
    windows = Windows(open_series(tmp_path), 10, 10, "none")
    with (tmp_path / "x" / "data-1-of-1.bin").open("r+b") as file:
        file.truncate(100)
    with (
        Loader(windows, 2, 0, "cpu", prefetch=1, workers=1) as loader,
        pytest.raises(UserError, match="truncated while it was in use"),
    ):
        for _ in range(20):
            next(loader)


def test_threads_end_with_close_and_with_the_last_reference():
    loader = Loader(numbered(50), 5, 0, "cpu")
    next(loader)
    assert data_threads()
    loader.close()
    loader.close()
    assert not data_threads()
    loader = Loader(numbered(50), 5, 0, "cpu")
    next(loader)
    del loader
    gc.collect()
    assert gone()


def test_a_forgotten_loader_does_not_keep_the_process(tmp_path):
    code = (
        "from steplab.data.loader import Loader\n"
        "from steplab.data.synthetic import SyntheticSeries\n"
        "from steplab.data.windows import Windows\n"
        "loader = Loader(Windows(SyntheticSeries(50, 64, 0), 32, 32), 4, 0, 'cpu')\n"
        "print(tuple(next(loader).values_BT.shape))\n"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(4, 32)\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 11}, "has 10 windows, which do not fill one batch of 11"),
        ({"batch": 0}, "batch is 0"),
        ({"workers": 0}, "workers 0"),
        ({"prefetch": 0}, "prefetch 0"),
        ({"position": Position(0, 11)}, "Epoch 0, window 11 is not in"),
        ({"position": Position(-1, 0)}, "Epoch -1, window 0 is not in"),
    ],
)
def test_impossible_requests(arguments, message):
    with pytest.raises(UserError, match=message):
        Loader(numbered(10), **{"batch": 2, "seed": 0, "device": "cpu", **arguments})
    assert gone()


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu_whole():
    windows = Windows(ListSeries([[i, 0] for i in range(4096)]), 2, 2, "none")
    with Loader(windows, 64, 0, "cuda", prefetch=8) as loader:
        got = [next(loader) for _ in range(64)]
    assert got[0].values_BT.is_cuda and got[0].mask_BT.is_cuda
    everything = torch.cat([batch.values_BT[:, 0] for batch in got]).int().tolist()
    assert everything == Order(4096, 0, 0)[np.arange(4096)].tolist()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_share_one_order_and_one_position(ranks):
    """23 windows in batches of 5: every second round of 4 ranks goes over the end of an epoch."""
    rounds = 6
    with Loader(numbered(23), 5, 11, "cpu") as alone:
        expected, positions = [], []
        for _ in range(rounds):
            expected += take(alone, ranks)
            positions.append(alone.position)
    for rank in range(ranks):
        with Loader(numbered(23), 5, 11, "cpu", rank=rank, ranks=ranks) as loader:
            for number in range(rounds):
                assert take(loader, 1) == [expected[number * ranks + rank]]
                assert loader.position == positions[number]


def test_ranks_continue_where_another_number_of_ranks_has_stopped():
    with Loader(numbered(23), 5, 11, "cpu") as alone:
        expected = take(alone, 12)
    with Loader(numbered(23), 5, 11, "cpu", rank=1, ranks=4) as loader:
        take(loader, 2)
        stopped = loader.position
    got = []
    for rank in range(2):
        with Loader(numbered(23), 5, 11, "cpu", stopped, rank=rank, ranks=2) as loader:
            got.append(take(loader, 2))
    assert [got[0][0], got[1][0], got[0][1], got[1][1]] == expected[8:]

import io
import tracemalloc

from steplab.trace.load import read_trace
from tests.trace import traces
from tests.trace.traces import kineto


def test_the_text_is_never_held_as_a_whole() -> None:
    shapes = [[64, 64]] * 20
    text = kineto(traces.op("aten::cat", at, 1, shapes=shapes) for at in range(10_000)).encode()
    stream = io.BytesIO(text)
    tracemalloc.start()
    try:
        trace = read_trace(stream, "t", piece=1 << 16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(trace.ops) == 10_000
    columns = 10_000 * 56  # bytes
    assert peak < 4 * columns < len(text)

import json

from hypothesis import given
from hypothesis import strategies as st

from steplab.trace.reading.json_text import complete_elements, depth_after

TEXTS = st.text(alphabet='ab"\\[]{},\n\u00e9', max_size=6)
VALUES = st.recursive(
    st.integers(0, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def depth_by_steps(text: bytes) -> list[int]:
    """Walk through the text byte by byte; return the depth after each, -99 inside strings."""
    depths, depth, inside, escaped = [], 0, False, False
    for byte in text.decode("latin-1"):
        if inside:
            inside = escaped or byte != '"'
            escaped = byte == "\\" and not escaped
        else:
            inside = byte == '"'
            depth += (byte in "[{") - (byte in "]}")
        depths.append(-99 if inside else depth)
    return depths


@given(st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), max_size=4), st.data())
def test_complete_elements_of_any_beginning_of_a_list(values: list[object], data: st.DataObject):
    text = json.dumps(values)[1:-1].encode()
    cut = data.draw(st.integers(0, len(text)))
    steps = depth_by_steps(text[:cut])
    ends = [i + 1 for i, depth in enumerate(steps) if depth == 0 and text[i : i + 1] == b"}"]
    found = complete_elements(text[:cut])
    assert (found.end, found.closed) == (ends[-1] if ends else 0, False)


@given(st.lists(VALUES, max_size=4), VALUES)
def test_the_end_of_the_list_is_found(values: list[object], other: object) -> None:
    listed = json.dumps(values)[1:-1].encode()
    found = complete_elements(listed + b'], "other": ' + json.dumps(other).encode() + b"}")
    assert (found.end, found.closed) == (len(listed), True)


@given(VALUES)
def test_depth(value: object) -> None:
    assert depth_after(b'{"a": [' + json.dumps(value).encode()) == 2

"""Hostile traces: a small honest one with a few things changed that no profiler writes.

    @given(hostile_traces())
    def test_...(data: bytes): ...

`open_trace` does with a file all that the commands do with it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from hypothesis import strategies as st

from steplab.cli.main import main
from steplab.costs.aten import MATRIX_COSTS, MEMORY_COSTS
from steplab.costs.own_ops import OWN_OPS
from tests.trace import traces

Fields = dict[str, str]  # keys of a JSON object, and the text of each value

DEVICE = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 80 << 30}
SHAPES, TYPES = [[8, 64], [64, 32]], ["c10::BFloat16", "c10::BFloat16"]


def honest_events(steps: int = 2) -> list[traces.Event]:
    """Return steps with ranges, operators, stacks, launches, kernels, a wait and an allocation."""
    events: list[traces.Event] = []
    for step in range(steps):
        at, id_ = step * 100_000, step * 10
        shapes = {"shapes": SHAPES, "strides": [[64, 1], [32, 1]], "dtypes": TYPES}
        events += [
            traces.range_(f"ProfilerStep#{step}", at, 90_000),
            traces.range_("forward", at, 40_000),
            traces.range_("backward", at + 40_000, 40_000),
            traces.range_("Optimizer.step#AdamW.step", at + 80_000, 9_000),
            traces.python("nn.Module: Linear_0", at + 1_000, 20_000),
            traces.python("model.py(12): forward", at + 500, 30_000),
            traces.op("aten::mm", at + 1_000, 9_000, sequence=step, values=["", ""], **shapes),
            *traces.launched("nvjet_tst_64x8", at + 2_000, at + 5_000, at + 9_000, 7_000, id_ + 1),
            traces.op(
                "aten::_foreach_add_",
                at + 12_000,
                5_000,
                shapes=[[[64, 32], [32]], []],
                strides=[[[32, 1], [1]], []],
                dtypes=["TensorList", "Scalar"],
                values=["", "1"],
            ),
            *traces.launched("multi_tensor_apply_kernel<float>", at + 13_000, at + 14_000,
                             at + 20_000, 3_000, id_ + 2),
            traces.op(
                "autograd::engine::evaluate_function: MmBackward0",
                at + 42_000, 9_000, traces.AUTOGRAD, sequence=step, forward_thread=1,
            ),
            *traces.launched("void softmax_warp_backward<float>(int)", at + 43_000, at + 44_000,
                             at + 45_000, 4_000, id_ + 3),
            traces.copy("Memcpy DtoH (Device -> Pageable)", at + 60_000, 2_000, id_ + 4, 4096),
            traces.call("cudaMemcpyAsync", at + 59_000, 4_000, id_ + 4),
            traces.call("cudaStreamSynchronize", at + 64_000, 6_000, id_ + 5),
            traces.fill(at + 75_000, 1_000, id_ + 6, 512),
            traces.memory(at + 3_000, 4096, allocated=1 << 20),
        ]  # fmt: skip
    return events


# Values as JSON text. Numbers at the borders of 32, 53, 63 and 64 bits and of a double, what JSON
# forbids but programs write, texts that steer a terminal, and nests deeper than any stack.
NUMBERS = [
    "0", "-1", "-0.5", "1e300", "-1e300", "1e999999999", "1e-999999999", "2147483648",
    "9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551615",
    "18446744073709551616", "4611686018427387904", "1" * 400, "9" * 5_000, "NaN", "Infinity",
    "-Infinity", "1.7976931348623157e308", "86400000000.000", "31536000000000",
]  # fmt: skip
TEXTS = [
    "", "5", "-7.5", "nan", "a\x1b[31mred\x1b[0m\x1b]0;title\x07", "\u202eabc", "<script>",
    "a" * 9_000,
    "ProfilerStep#", "ProfilerStep#7", "ProfilerStep#" + "9" * 30, "ProfilerStep#" + "9" * 5_000,
    "aten::mm", "aten::_log_softmax", "aten::topk", "cudaGraphInstantiate", "module:" + "1a" * 500,
    "triton_poi_fused_" + "1" * 500, "nccl", "TensorList", "float", "c10::Half", "data", "forward",
    "Memcpy HtoD (Pageable -> Device)", "\ud800", "=1+1", "[1, 2]", "True",
]  # fmt: skip
NESTS = ["[" * n + "]" * n for n in (1, 2, 3, 90, 600, 3_000, 200_000)]
NESTS += ['{"a":' * n + "1" + "}" * n for n in (1, 90, 600, 3_000, 200_000)]
OTHERS = ["null", "true", "false", "[]", "{}", "[null]", '[["a", 1], {"b": 2}]', "[[1, 2], 3]"]
OTHERS += ["[[-1, 5], [5, 9]]", "[[1e300, 2], [2, 3]]", f"[{','.join(['4'] * 500)}]", "[[[[1]]]]"]
OTHERS += [f"[[{'9' * 25}, 2], [2, {'9' * 25}]]", '["float", 5]', "[8, 64, 64]", '[[""], ""]']
BROKEN = ["", "nul", "'a'", '"a', "[1", "{", "01", "1 2", "5-3", "+1", ".5", "1.", '"\\x"', '"\t"']

values = st.sampled_from(
    [*NUMBERS, *map(json.dumps, TEXTS), *NESTS, *OTHERS, *(json.dumps(n) for n in NUMBERS)]
)
KEYS = ["ph", "ts", "dur", "name", "cat", "pid", "tid", "args", "s", "traceEvents"]
ARGUMENTS = [
    "Input Dims", "Input dims", "Input type", "Input Strides", "Concrete Inputs", "correlation",
    "Sequence number", "Fwd thread id", "device", "stream", "bytes", "graph id", "grid", "Bytes",
    "Addr", "Total Allocated", "Device Type",
]  # fmt: skip
OPERATORS = [
    *MATRIX_COSTS, *(f"aten::{name}" for name in MEMORY_COSTS), "aten::_foreach_add_", "aten::cat",
    "aten::scaled_dot_product_attention", "triton_tem_fused_mm_1", "triton_red_fused_add_2",
    "aten::_scaled_dot_product_attention_math", "aten::rms_norm", "aten::layer_norm", "aten::topk",
    *(f"steplab::{name}" for name in OWN_OPS),
]  # fmt: skip
PHASES = [
    json.dumps(phase) for phase in ("X", "B", "E", "i", "M", "s", "?", "XX", "", "b", "\u00e9")
]
CATEGORIES = ["cpu_op", "kernel", "gpu_memcpy", "user_annotation", "python_function", "Operator"]


def fields_of(event: traces.Event) -> tuple[Fields, Fields]:
    """Return the fields of an event and of its arguments as JSON text."""
    own = {
        key: value if key in ("ts", "dur") else json.dumps(value) for key, value in event.items()
    }
    own.pop("args", None)
    return own, {key: json.dumps(value) for key, value in event.get("args", {}).items()}


def event_json(event: traces.Event, **changes: str) -> str:
    """Return an event as JSON, some of its fields replaced by other JSON."""
    own, args = fields_of(event)
    return joined({**own, "args": joined(args), **changes})


def file_json(events: Iterable[str], **properties: str) -> str:
    """Return a file that has these events and properties, all given as JSON."""
    listed = f"[{', '.join(events)}]"
    return joined({"deviceProperties": json.dumps([DEVICE]), **properties, "traceEvents": listed})


def joined(fields: Fields) -> str:
    """Return a JSON object."""
    return "{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in fields.items()) + "}"


sizes = st.lists(st.sampled_from([0, 1, 2, 8, 33, 64, 2_000, 2**31, 2**62]), max_size=5)
types = st.sampled_from(["float", "c10::BFloat16", "c10::Half", "double", "TensorList", "Scalar"])
words = st.sampled_from(["", "True", "False", "2", "0", "-1", "[1, 1]", "[0]", "0.5", "nan", "?"])


@st.composite
def calls(draw: st.DrawFn) -> Fields:
    """Return the arguments of an operator: of the right types, but not what the operator takes."""
    tensors = draw(st.lists(sizes | st.lists(sizes, max_size=3), max_size=12))
    many = {"min_size": len(tensors), "max_size": len(tensors)}
    args = {
        "Input Dims": tensors,
        "Input Strides": draw(st.just(tensors) | st.lists(sizes, max_size=12)),
        "Input type": draw(st.lists(types, **many)),
        "Concrete Inputs": draw(st.lists(words, **many)),
    }
    return {key: json.dumps(value) for key, value in args.items()}


@st.composite
def changed_events(draw: st.DrawFn) -> list[str]:
    """Return the events of a trace as JSON text, some of them changed."""
    events = [fields_of(event) for event in honest_events(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(events) - 1))
        own, args = (dict(part) for part in events[place])
        kinds = ["value", "argument", "call", "phase", "category", "copy", "all"]
        change = draw(st.sampled_from(kinds))
        if change == "value":
            own[draw(st.sampled_from(KEYS))] = draw(values)
        elif change == "argument":
            args[draw(st.sampled_from(ARGUMENTS))] = draw(values)
        elif change == "call":
            own["name"] = json.dumps(draw(st.sampled_from(OPERATORS)))
            args = draw(calls())
        elif change == "phase":
            own["ph"] = draw(st.sampled_from(PHASES))
        elif change == "category":
            own["cat"] = json.dumps(draw(st.sampled_from(CATEGORIES)))
        elif change == "copy":
            events.insert(place, (own, args))
        else:  # every event alike: nothing of that kind is left
            key, value = draw(st.sampled_from(["ts", "dur", "name", "pid"])), draw(values)
            events = [({**one, key: value}, more) for one, more in events]
            continue
        if draw(st.booleans()) and own:
            own.pop(draw(st.sampled_from(sorted(own))))
        events[place] = own, args
    texts = [joined({"args": joined(args), **own}) for own, args in events]
    if draw(st.integers(0, 3)) == 0:
        other = draw(values | st.sampled_from(BROKEN) | st.sampled_from(["1", "[]", '"a"']))
        texts.insert(draw(st.integers(0, len(texts))), other)
    return texts


@st.composite
def changed_files(draw: st.DrawFn) -> bytes:
    """Return the text of a whole trace file: properties around changed events."""
    properties = {"schemaVersion": "1", "deviceProperties": json.dumps([DEVICE])}
    properties["baseTimeNanoseconds"] = "1790857026000000000"
    if draw(st.booleans()):
        properties[draw(st.sampled_from([*properties, "other"]))] = draw(values)
    if draw(st.booleans()):
        changed = {**{key: json.dumps(value) for key, value in DEVICE.items()}}
        changed[draw(st.sampled_from([*changed, "more"]))] = draw(values)
        properties["deviceProperties"] = f"[{joined(changed)}]"
    listed = "[" + draw(st.sampled_from([",", ", ", ",\n  "])).join(draw(changed_events())) + "]"
    around = draw(st.sampled_from(["before", "behind", "alone"]))
    if around == "alone":
        text = listed
    elif around == "behind":
        text = joined({"traceEvents": listed, **properties})
    else:
        text = joined({**properties, "traceEvents": listed})
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the bytes cut, or with some replaced or added."""
    kind = draw(st.sampled_from(["cut", "replace", "insert", "blank", "remove"]))
    place = draw(st.integers(0, len(data)))
    if kind == "cut":
        return data[:place]
    if kind == "remove":
        return data[:place] + data[place + draw(st.integers(1, 40)) :]
    if kind == "blank":
        return data[:place] + b" " * draw(st.sampled_from([1, 70_000])) + data[place:]
    some = draw(st.binary(min_size=1, max_size=4))
    return data[:place] + some + data[place + (len(some) if kind == "replace" else 0) :]


@st.composite
def hostile_traces(draw: st.DrawFn) -> bytes:
    """Return the bytes of a file that was given as a trace: JSON or gzip, whole or damaged."""
    data = draw(changed_files())
    if draw(st.integers(0, 3)) == 0:
        data = draw(damaged(data))
    if draw(st.integers(0, 3)) == 0:
        data = gzip.compress(data, 1, mtime=0)
        if draw(st.booleans()):
            data = draw(damaged(data))
    return data


def open_trace(path: Path, page: Path, honest: Path) -> list[int]:
    """Run the commands that open a trace; return their exit codes."""
    return [
        main(["explain", str(path), "--page", str(page)]),
        main(["compare", str(path), str(honest)]),
        main(["compare", str(honest), str(path), "--out", str(page.with_suffix(".compare.html"))]),
    ]

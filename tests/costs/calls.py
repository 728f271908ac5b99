"""Calls of operators for tests, as the profiler writes them, and what they cost."""

from __future__ import annotations

import json

from steplab.costs.op_call import OpCall, read_call
from steplab.trace.roofline import cost_of_call

BF16, FP32, INT = "c10::BFloat16", "float", "long int"


def called(name, shapes, dtypes, values=(), strides=None) -> OpCall:
    texts = (json.dumps(part) if part is not None else "" for part in (shapes, strides, values))
    found = read_call(name, json.dumps(dtypes), *texts)
    assert found is not None
    return found


def cost(name, shapes, dtypes, values=(), strides=None, kernel_name=""):
    found = cost_of_call(called(name, shapes, dtypes, values, strides), kernel_name)
    assert found is not None
    return found.flops, found.bytes

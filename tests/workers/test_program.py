"""What the program of a worker answers, called in this process."""

import importlib
import io
import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest

import steplab
from steplab.core import Samples
from steplab.core.codec import encode
from steplab.workers.program import Program

SERVED = "tests.workers.served"


@pytest.fixture
def answers():
    replies = io.StringIO()
    program = Program(replies)

    def ask(call: str, keep: bool = False, **arguments):
        replies.truncate(replies.seek(0))
        program.answer({"call": call, "arguments": arguments, "keep": keep, "models": {}})
        return [json.loads(line) for line in replies.getvalue().splitlines()]

    return ask


def test_arguments_are_decoded_by_their_annotations_and_progress_is_sent(answers):
    samples = encode(Samples((1.0, 2.0), "ms"))
    told, done = answers(f"{SERVED}:scaled", samples=samples, factor=3)
    assert told == {"progress": "scaling by 3"}
    assert done == {"result": encode(Samples((3.0, 6.0), "ms"))}


def test_an_object_is_kept_and_its_methods_are_called(answers, tmp_path):
    assert answers(f"{SERVED}:Counter", True, folder=str(tmp_path), start=2) == [{"result": None}]
    assert answers(".add", steps=3) == [{"result": 5}]
    assert answers(".add", steps=1) == [{"result": 6}]
    assert answers(".name") == [{"result": tmp_path.name}]


def test_errors_keep_their_kind_and_others_are_put_into_a_sentence(answers):
    refusal = {"error": "Unsupported", "message": "No GPU.", "suggestion": "Try something else."}
    assert answers(f"{SERVED}:refuse", reason="No GPU") == [refusal]
    (failure,) = answers(f"{SERVED}:fail")
    assert failure["error"] == "MeasurementError"
    assert failure["message"] == "ZeroDivisionError: nothing left."


def test_a_wrong_argument_is_an_error_and_not_a_lost_worker(answers):
    (reply,) = answers(f"{SERVED}:Counter", folder="x", start="two")
    assert reply["error"] == "UserError" and "start" in reply["message"]


def test_every_function_that_a_parent_names_exists():
    """They are strings, because the parent must not import torch."""
    root = Path(steplab.__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in root.rglob("*.py"))
    named = sorted(set(re.findall(r'"(steplab\.[\w.]+):(\w+)"', text)))
    assert ("steplab.step.trial", "trial") in named and len(named) >= 10
    for module, name in named:
        function = getattr(importlib.import_module(module), name)
        get_type_hints(function.__init__ if isinstance(function, type) else function)

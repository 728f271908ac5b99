import getpass
import json
import platform

import torch

from steplab.codec import encode
from steplab.probes.environment import capture


def test_environment_says_what_runs():
    environment = capture()
    assert environment.torch == torch.__version__
    assert environment.python == platform.python_version()
    assert environment.cores >= 1 and environment.memory_bytes > 2**20
    assert environment.torch in environment.conditions


def test_environment_holds_no_host_or_home(monkeypatch):
    text = json.dumps(encode(capture()))
    assert platform.node() not in text or platform.node() in ("", "localhost")
    assert f"/home/{getpass.getuser()}" not in text

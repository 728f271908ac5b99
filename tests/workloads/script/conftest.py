"""A folder for training scripts, from which nothing is imported afterward."""

import sys

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.delitem(sys.modules, "net", raising=False)
    monkeypatch.setitem(sys.modules, "net", None)
    del sys.modules["net"]
    return tmp_path

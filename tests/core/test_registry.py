import pytest

from steplab.core import registry
from steplab.core.errors import UserError


def test_names_lists_members_only():
    found = registry.names("steplab.techniques", "TECHNIQUE")
    assert {"compile", "impl", "optimizer", "precision"} <= set(found)
    assert "technique" not in found and "recipes" not in found


def test_unknown_member_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'precision'"):
        registry.load("steplab.techniques", "precison", "TECHNIQUE")


def test_a_new_file_is_a_member(tmp_path, monkeypatch):
    package = tmp_path / "dropped"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "new.py").write_text("TECHNIQUE = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.names("dropped", "TECHNIQUE") == ["new"]
    assert registry.load("dropped", "new", "TECHNIQUE") == 42

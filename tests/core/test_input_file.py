import json
import os
import socket

import pytest

from steplab.core import input_file
from steplab.core.errors import UserError
from steplab.core.input_file import (
    check_memory,
    file_kind,
    open_input,
    parse_json,
    parse_toml,
    read_input,
    set_memory_limit,
    shorten,
)


@pytest.fixture
def small_limit():
    set_memory_limit(1000)
    yield
    set_memory_limit(None)


def test_a_regular_file_is_read(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b"[1]")
    assert file_kind(file) == ""
    assert read_input(file) == b"[1]"


def test_what_is_no_regular_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    cases = {
        tmp_path: "a folder",
        tmp_path / "pipe": "a pipe",
        tmp_path / "socket": "socket",
        tmp_path / "loop": "symbolic link",
        tmp_path / ("x" * 5000): "longer than a file name",
        tmp_path / "absent": "There is no file",
        tmp_path / "a\0b": "cannot be read",
    }
    for path, words in cases.items():
        with pytest.raises(UserError, match=words) as error:
            open_input(path)
        assert len(str(error.value)) < 400
    server.close()


def test_a_file_beyond_the_limit_is_not_read(tmp_path, small_limit):
    file = tmp_path / "large"
    file.write_bytes(bytes(1001))
    with pytest.raises(UserError, match="--max-memory 1GiB"):
        read_input(file)
    check_memory(1000, "this")


def test_the_limit_is_a_quarter_of_the_memory():
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert input_file.memory_limit() == pages // 4


@pytest.mark.parametrize("depth", [101, 900, 100_000])
def test_deep_nesting_is_one_sentence(depth):
    with pytest.raises(UserError, match="nests deeper"):
        parse_json("[" * depth + "]" * depth, "a")
    with pytest.raises(UserError, match="nests deeper"):
        parse_toml("a = " + "[" * depth + "]" * depth, "a")


def test_honest_documents_are_parsed():
    deep = json.loads("[" * 99 + "]" * 99)
    assert parse_json("[" * 99 + "]" * 99, "a") == deep
    assert parse_json(b'{"a": NaN}', "a")["a"] != 0
    assert parse_toml("a = 1", "a") == {"a": 1}


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe\x00", "9" * 5000])
def test_broken_json_is_one_sentence(text):
    with pytest.raises(UserError, match="is not JSON"):
        parse_json(text, "a")


def test_a_path_in_a_message_is_short_and_harmless():
    assert len(shorten("x" * 5000)) < 210
    assert shorten("a\x1b[31mb") == "a\\x1b[31mb"

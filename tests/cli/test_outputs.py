"""Every flag that names a file or folder to write refuses what it must not replace, at once."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from steplab.cli.command import Command, Group, Parser
from steplab.cli.main import main

FILES = {
    "explain --page": "{}.html",
    "report --out": "{}.html",
    "runs --out": "{}.csv",
    "runs --pack": "{}.zip",
    "compare a b --out": "{}.md",
    "forecast in.csv --horizon 3 --out": "{}.csv",
    "forecast in.csv --horizon 3 --picture": "{}.html",
    "evaluate --out": "{}.json",
    "evaluate --picture": "{}.html",
    "lint --out": "{}.csv",
    "data info in.csv --out": "{}.csv",
    "bench step gpt --out": "{}.csv",
    "bench infer gpt --out": "{}.csv",
    "bench precision --out": "{}.csv",
    "bench collectives --out": "{}.csv",
    "bench attention --out": "{}.csv",
    "bench attention --plot": "{}.svg",
}
FOLDERS = (
    "tune gpt --out",
    "profile gpt --out",
    "export --out",
    "data pack in.csv --out",
    "data clean in.csv --out",
    "data download electricity --out",
)


@pytest.mark.parametrize("words", FILES)
def test_a_file_to_write_is_looked_at_first(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipe = FILES[words].format("pipe")
    os.mkfifo(pipe)
    flag = words.split()[-1]
    assert main([*words.split(), pipe]) == 2
    said = capsys.readouterr().err
    assert f"{pipe} is a pipe" in said and f"with {flag}." in said
    assert os.listdir() == [pipe], "nothing was written, and nothing measured"


@pytest.mark.parametrize("words", FOLDERS)
def test_a_folder_to_write_is_looked_at_first(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert main([*words.split(), "pipe"]) == 2
    assert "pipe is a pipe, not a folder. Choose another place with --out." in (
        capsys.readouterr().err
    )


def commands(group: Group) -> Iterator[Command]:
    for name in group.names():
        found = group.load(name)
        yield from commands(found) if isinstance(found, Group) else [found]


@pytest.mark.parametrize(
    "words",
    [
        "compare in.json other.json --out in.json",
        "forecast in.json --horizon 3 --out ./in.json",
        "evaluate --data link.json --out in.json",
    ],
)
def test_what_is_read_is_never_replaced(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in.json").write_text("[[1, 2, 3]]")
    os.symlink("in.json", "link.json")
    assert main(words.split()) == 2
    assert "in.json is read, and would be replaced. Choose another" in capsys.readouterr().err
    assert Path("in.json").read_text() == "[[1, 2, 3]]"


@pytest.mark.parametrize("words", ["explain in.json --page in.json", "report --out in.json"])
def test_a_page_has_the_suffix_of_one(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in.json").write_text("{}")
    assert main(words.split()) == 2
    assert "must end in .html, but is in.json" in capsys.readouterr().err
    assert Path("in.json").read_text() == "{}"


def test_no_flag_for_an_output_takes_any_path():
    for command in commands(Group("steplab.cli")):
        parser = Parser("steplab", "")
        command.flags(parser, [])
        for flag in {"--out", "--page", "--plot", "--picture"} & set(parser._option_string_actions):
            assert parser._option_string_actions[flag].type is not Path, (command, flag)

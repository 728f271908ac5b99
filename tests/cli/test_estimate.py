"""steplab estimate as a user runs it."""

import pytest

from steplab.cli.main import main

TINY = ["estimate", "gpt", "--size", "tiny", "--layers", "2", "--batch", "2"]


def test_a_table_over_ranks_with_cost_and_memory(tmp_path, capsys):
    words = [*TINY, "--ranks", "1", "8", "--tokens", "1e9", "--price", "2.5"]
    assert main([*words, "--store", str(tmp_path), "--out", str(tmp_path / "t.json")]) == 0
    shown = capsys.readouterr().out
    assert "largest batch that fits" in shown and "counted" in shown and "modelled" in shown
    assert (tmp_path / "t.json").is_file()
    assert len(list((tmp_path / "predictions").glob("*.json"))) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "h900"], "no card 'h900'"),
        (["--network", "carrier-pigeon"], "no link 'carrier-pigeon'"),
        (["--tokens", "-1"], "--tokens must be more than 0"),
        (["--ranks", "0"], "--ranks and --per-machine must be at least 1"),
        (["--calibration"], "no Run of any of these steps"),
    ],
)
def test_bad_input_is_one_sentence(words, said, tmp_path, capsys):
    assert main([*TINY, *words, "--store", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_never_fits_is_told_with_what_it_needs(tmp_path, capsys):
    words = ["estimate", "gpt", "--size", "2.7b", "--layers", "4", "--on", "t4", "--batch", "1"]
    code = main([*words, "--vocab-size", "500000", "--store", str(tmp_path)])
    assert code == 2
    assert "has 14." in capsys.readouterr().err

import pytest
import torch

from steplab.core import PLAIN
from steplab.core.errors import UserError
from steplab.techniques.recipes import parse_recipe
from steplab.train.generate import Sampling, load_text_generator
from steplab.train.log import TrainingLog
from steplab.train.loop import train
from steplab.train.stop import Stop
from tests.step.test_decode_step import WatchingTape
from tests.train.test_text import make_spec

SENTENCE = "the quick brown fox. "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model that has learned one sentence by heart."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_text(SENTENCE * 300)
    spec = make_spec(folder / "run", text, steps_per_epoch=100, lr=1e-2, checkpoint_every=100)
    train(spec, TrainingLog(lambda line: None, None, perf=False), Stop())
    return folder / "run"


def written(generator, prompt=b"the quick", length=24, temperature=0.0, top_k=0, seed=0):
    told = bytearray()
    found = generator.generate(prompt, length, temperature, top_k, seed, told.append)
    assert found == told
    return found


def test_it_goes_on_as_it_was_taught(checkpoint):
    generator = load_text_generator(checkpoint, "cpu", PLAIN)
    assert written(generator).decode() == (SENTENCE * 3)[9:33]


def test_every_byte_is_the_likeliest_of_the_whole(checkpoint):
    """Streaming gives what the model says of the whole text so far."""
    generator = load_text_generator(checkpoint, "cpu", PLAIN)
    found = written(generator, b"qx ", 12)
    generator.model.become_causal()
    text = list(b"qx ")
    for byte in found:
        logits = generator.model(torch.tensor([text]))[0, -1]
        assert int(logits.argmax()) == byte
        text.append(byte)


def test_text_that_is_not_replayed_says_where_the_host_waits(checkpoint, monkeypatch):
    graphs, told = WatchingTape(torch.device("cpu")), []
    graphs.waits = "model.py:7"
    monkeypatch.setattr("steplab.train.generate.graphs_on", lambda device: graphs)
    generator = load_text_generator(checkpoint, "cpu", PLAIN)
    assert len(generator.generate(b"the", 4, warn=told.append)) == 4
    assert [note.endswith("waits for the device at model.py:7.") for note in told] == [True]


def test_one_seed_one_text(checkpoint):
    generator = load_text_generator(checkpoint, "cpu", PLAIN)
    texts = [written(generator, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_recipe_may_change_the_precision_but_not_compile(checkpoint):
    generator = load_text_generator(checkpoint, "cpu", parse_recipe("precision=bf16"))
    assert written(generator, length=8).decode() == (SENTENCE * 3)[9:17]
    with pytest.raises(UserError, match="recipe for generation cannot have compile"):
        load_text_generator(checkpoint, "cpu", parse_recipe("compile=blocks"))


def choose(logits, *options):
    noise = torch.empty(logits.shape, dtype=torch.float64)
    noise.exponential_(generator=torch.Generator().manual_seed(0))
    return Sampling(*options).choose(logits, noise)[:, 0]


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(4000, 3)
    shares = choose(logits, 1.0).bincount() / 4000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.03, rtol=0)
    best_two = choose(logits, 1.0, 2).bincount(minlength=3) / 4000
    torch.testing.assert_close(best_two, torch.tensor([0.625, 0.375, 0]), atol=0.03, rtol=0)
    assert (choose(logits, 0.05) == 0).float().mean() > 0.99
    assert not choose(logits, 0.0).any()


def test_sampling_is_torchs_with_numbers_that_are_drawn_before():
    logits = torch.randn(500, 40)
    generator = torch.Generator().manual_seed(0)
    expected = torch.multinomial((logits.double() / 0.7).softmax(-1), 1, generator=generator)
    assert torch.equal(choose(logits, 0.7), expected[:, 0])


def test_a_long_prompt_in_pieces_is_the_prompt(checkpoint, monkeypatch):
    generator = load_text_generator(checkpoint, "cpu", PLAIN)
    prompt = (SENTENCE * 4).encode()
    whole = generator.generate(prompt, 12)
    monkeypatch.setattr("steplab.train.generate.PROMPT_CHUNK", 7)
    assert generator.generate(prompt, 12) == whole

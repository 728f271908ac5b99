"""Steps over static caches: what the whole text gives, and replayed the very same bits."""

import pytest
import torch

from steplab.forecasting.decode import Cached, Uncached, choose_heads, decode, plan_passes
from steplab.forecasting.forecaster import Forecaster
from steplab.step.decode_step import graphs_on
from steplab.testing.tolerance import assert_as_good_as
from steplab.train.generate import Sampling, TokenWriter
from steplab.workloads.workload import find_workload
from tests.forecasting.models import model as tsmoe
from tests.step.test_decode_step import CPU, WatchingTape

SHARED = {"width": 32, "ff_width": 48, "context": 24, "vocab_size": 256}
ROUTED = {**SHARED, "blocks": 4, "recursions": 2, "heads": 4, "kv_heads": 2}
MODELS = {
    "gpt": ("gpt", {**SHARED, "layers": 2, "heads": 2, "max_context": 64}),
    "gpt, fused": ("gpt", {**SHARED, "layers": 2, "heads": 2, "fused_projections": True}),
    "hydra": ("hydra", ROUTED),
    "hydra by its code": ("hydra", {**ROUTED, "attention": "hydra", "mor": "capacity"}),
    "hydra, packed": ("hydra", {**ROUTED, "mod": "dense", "mor": "packed"}),
    "megalodon": ("megalodon", {**SHARED, "chunk": 8, "shared_width": 16, "value_width": 32}),
}
ROWS, PROMPT, LENGTH = 2, 11, 20


def build(name, dtype=torch.float64, device="cpu"):
    workload, changes = MODELS[name]
    entry = find_workload(workload)
    opened = entry.open(entry.resolve("tiny", changes))
    torch.manual_seed(0)
    model = opened.model()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # large enough that every part shows in the logits
            torch.nn.init.normal_(parameter, std=0.3)
    return opened, model.to(device, dtype).eval()


def prompt(device="cpu"):
    return torch.randint(256, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1)).to(device)


def write(workload, model, sampling, graphs, length=LENGTH):
    reader = workload.generator(model, ROWS, PROMPT + length)
    writer = TokenWriter(reader, prompt(next(model.parameters()).device), sampling, graphs)
    return torch.cat([writer() for _ in range(length)], 1), writer


def logits_by_steps(workload, model, tokens_BT):
    reader = workload.generator(model, ROWS, tokens_BT.shape[1])
    logits = [reader(tokens_BT[:, :PROMPT])]
    logits += [reader.step(token_B1) for token_B1 in tokens_BT[:, PROMPT:].split(1, 1)]
    return torch.stack(logits, 1)


@pytest.mark.parametrize("name", MODELS)
def test_every_token_is_the_likeliest_of_the_whole(name):
    workload, model = build(name)
    with torch.no_grad():
        found, _ = write(workload, model, Sampling(), None)
        text = torch.cat([prompt(), found], 1)
        whole = model(text)[:, PROMPT - 1 : -1]
    assert torch.equal(found, whole.argmax(-1))


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_as_near_to_fp64_as_the_whole(name):
    workload, model = build(name, torch.float32)
    _, exact = build(name)
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(256, (ROWS, 30), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = logits_by_steps(workload, model, tokens)
        exact_found = logits_by_steps(workload, exact, tokens)
        peer, truth = (each(tokens)[:, PROMPT - 1 :] for each in (model, exact))
    torch.testing.assert_close(exact_found, truth, rtol=1e-10, atol=1e-11)
    assert_as_good_as(found, peer, truth, "logits")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 20, seed=3)])
def test_replays_have_the_bits_of_the_step(name, sampling):
    """The tape freezes numbers and addresses as a CUDA graph does."""
    workload, model = build(name, torch.float32)
    graphs = WatchingTape(CPU)
    with torch.no_grad():
        eager, _ = write(workload, model, sampling, None)
        replayed, writer = write(workload, model, sampling, graphs)
    assert torch.equal(eager, replayed) and not writer.step.why_not
    assert (graphs.captures, graphs.replays) == (1, LENGTH - 2)


def forecasts(net, feed, lengths=(40, 17), horizon=150, seed=0):
    """Of ragged contexts, over several passes, twice: the second time in the same cache."""
    generator = torch.Generator().manual_seed(seed)
    device, dtype = next(net.parameters()).device, next(net.parameters()).dtype
    heads = choose_heads(horizon, net.config.horizon_lengths, net.config.patch_length, "largest")
    passes = plan_passes(heads, net.config.seq_max_len)
    found = []
    for _ in range(2):
        values_BT = torch.randn(2, max(lengths), generator=generator).to(device, dtype)
        documents_BT = torch.ones(2, max(lengths), dtype=torch.int32, device=device)
        documents_BT[1, : max(lengths) - min(lengths)] = 0
        found.append(decode(feed, values_BT, documents_BT, passes))
    return torch.cat([one.points_BH for one in found]), passes


@pytest.mark.parametrize("options", [{}, {"quantiles": "0.1,0.9"}, {"layout": "time-moe"}])
def test_replayed_forecasts_have_the_bits_of_the_step(options):
    net, graphs = tsmoe(torch.float32, **options), WatchingTape(CPU)
    eager, passes = forecasts(net, Cached(net, None))
    feed = Cached(net, graphs)
    replayed, _ = forecasts(net, feed)
    assert len(passes) > 1 and torch.equal(eager, replayed)
    assert graphs.captures == sum(bool(step._call.captures) for step in feed.steps.values()) > 0
    exact = tsmoe(torch.float64, **options)
    exact.load_state_dict(net.state_dict())
    truth, _ = forecasts(exact, Uncached(exact))
    peer, _ = forecasts(net, Uncached(net))
    assert_as_good_as(replayed, peer, truth, "forecasts")


def test_graphs_are_kept_for_contexts_of_similar_length_only():
    net, graphs = tsmoe(torch.float32), WatchingTape(CPU)
    feed = Cached(net, graphs)
    forecasts(net, feed, horizon=40)
    kept = feed.cache, dict(feed.steps)
    forecasts(net, feed, lengths=(38, 5), horizon=40)
    assert (feed.cache, feed.steps) == kept
    forecasts(net, feed, lengths=(20, 5), horizon=20)
    assert feed.cache is not kept[0] and feed.steps != kept[1]


def test_a_forecast_says_once_that_it_is_not_replayed_and_where_the_host_waits(monkeypatch):
    graphs, told = WatchingTape(CPU), []
    graphs.waits = "experts.py:7"
    monkeypatch.setattr("steplab.forecasting.inference.graphs_on", lambda device: graphs)
    forecaster = Forecaster(tsmoe(torch.float32), warn=told.append)
    contexts = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        forecaster.predict(contexts, 150)
    (note,) = told
    assert note.endswith("op by op: the host waits for the device at experts.py:7.")


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpu_replays_have_the_bits_of_the_step(name, precision):
    workload, model = build(name, torch.float32, "cuda")
    device = next(model.parameters()).device
    halves = torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16")
    with torch.inference_mode(), halves:
        for sampling in (Sampling(), Sampling(0.9, 20, seed=3)):
            eager, _ = write(workload, model, sampling, None)
            replayed, writer = write(workload, model, sampling, graphs_on(device))
            assert torch.equal(eager, replayed) and not writer.step.why_not


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpu_replayed_forecasts_have_the_bits_of_the_step(precision):
    net = tsmoe(torch.float32).cuda()
    feed = Cached(net, graphs_on(torch.device("cuda")))
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        eager, _ = forecasts(net, Cached(net, None))
        replayed, _ = forecasts(net, feed)
    assert torch.equal(eager, replayed)
    assert not any(step.why_not for step in feed.steps.values())

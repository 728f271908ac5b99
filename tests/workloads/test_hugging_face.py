"""`hf:` workloads against transformers itself."""

import json

import pytest
import torch

from steplab.core import RunSpec
from steplab.core.errors import Unsupported, UserError
from steplab.step.assemble import assemble
from steplab.workloads import hugging_face
from steplab.workloads.workload import find_workload, is_user_model, requested_workload

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


@pytest.fixture
def transformers():
    reason = "transformers is an optional extra, steplab[hf]"
    return pytest.importorskip("transformers", reason=reason)


@pytest.fixture
def folder(tmp_path):
    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        return tmp_path

    return write


def open_model(word, **config):
    entry = requested_workload(f"hf:{word}")
    config = entry.resolve(entry.default_size("cpu"), config)
    torch.manual_seed(0)
    workload = entry.open(config)
    return workload, workload.model()


def test_a_folder_is_the_model_of_its_config_with_its_own_loss(transformers, folder):
    workload, model = open_model(folder(), context=16)
    torch.manual_seed(0)
    config = transformers.LlamaConfig.from_pretrained(folder())
    twin = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32)
    assert model.state_dict().keys() == twin.state_dict().keys()
    batch = next(workload.batches(3, torch.device("cpu"), 0))
    assert batch["input_ids"].shape == (3, 16) and batch["input_ids"].max() < 97
    twin.load_state_dict(model.state_dict())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    expected, found = twin(**batch).loss, workload.loss(model, batch).loss
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    assert workload.tokens(3) == 48


@pytest.mark.parametrize(
    ("word", "task", "kind", "tokens"),
    [
        ("bert", "auto", "BertForMaskedLM", 16),
        ("bert", "text-classification", "BertForSequenceClassification", 16),
        ("gpt2", "auto", "GPT2LMHeadModel", 16),
        ("qwen2_moe", "auto", "Qwen2MoeForCausalLM", 16),
        ("t5", "auto", "T5ForConditionalGeneration", 32),
        ("vit", "auto", "ViTForImageClassification", 1),
    ],
)
def test_model_types_train_for_their_task(transformers, word, task, kind, tokens):
    entry = requested_workload(f"hf:{word}")
    config = entry.resolve("tiny", {"context": 16, "task": task})
    step = assemble(RunSpec(entry.name, config, batch=2))
    assert type(step.model).__name__ == kind and step.workload.tokens(1) == tokens
    batches = step.workload.batches(2, torch.device("cpu"), 0)
    losses = [step([next(batches)]).loss for _ in range(2)]
    assert torch.isfinite(torch.stack(losses)).all()
    missing = [name for name, p in step.model.named_parameters() if not step.optimizer.state[p]]
    # Qwen2-MoE has experts that no token chose; T5's and BERT's parameters are all used.
    assert not missing or word == "qwen2_moe", missing


def test_settings_change_the_config(transformers, folder):
    _, model = open_model(folder(), settings="num_hidden_layers=1,rms_norm_eps=1e-5", context=8)
    assert len(model.model.layers) == 1 and model.config.rms_norm_eps == 1e-5
    with pytest.raises(UserError, match=r"no field 'hiden_size'.* Did you mean 'hidden_size'"):
        open_model(folder(), settings="hiden_size=8")
    with pytest.raises(
        UserError, match=r"transformers refuses this config of llama: .*hidden_size"
    ):
        open_model(folder(), settings="hidden_size=abc")


def test_a_config_is_data(transformers, folder):
    with pytest.raises(UserError, match=r"names code of its own \(auto_map\).* my_model.py:make"):
        open_model(folder(auto_map={"AutoModelForCausalLM": "evil.Model"}))
    nested = {"text_config": {"auto_map": {}}}
    with pytest.raises(UserError, match="auto_map"):
        open_model(folder(**nested))
    with pytest.raises(UserError, match=r"kernels to fetch \(attn_implementation\)"):
        open_model(folder(attn_implementation="somebody/kernel"))
    for field in ("attn_implementation", "_attn_implementation"):
        with pytest.raises(UserError, match=r"kernels to fetch|has no field"):
            open_model(folder(), settings=f"{field}=somebody/kernel")


def test_a_record_holds_the_hash_of_the_config(transformers, folder):
    name = f"hf:{folder()}"
    source = requested_workload(name).source
    assert find_workload(name, source).source == source and not is_user_model(name)
    folder(hidden_size=64)
    with pytest.raises(UserError, match=r"has changed: the hash of its config\.json was"):
        find_workload(name, source)


def test_sizes_follow_the_device(transformers, folder):
    by_type, by_folder = requested_workload("hf:llama"), requested_workload(f"hf:{folder()}")
    assert [by_type.default_size(d) for d in ("cpu", "cuda")] == ["tiny", "full"]
    assert by_folder.default_size("cpu") == "full"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("no-such/model", "steplab downloads nothing.* hf download no-such/model config.json"),
        ("lama", "no model type of transformers"),
        ("missing.json", "There is no file missing.json"),
        ("llava", "no llava for any task that steplab knows"),
    ],
)
def test_what_is_no_model(transformers, word, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        open_model(word)


def test_contexts_that_do_not_fit(transformers, folder):
    with pytest.raises(UserError, match=r"context 65 is longer than the 64 positions"):
        open_model(folder(), context=65)
    workload, _ = open_model(folder(max_position_embeddings=50))
    assert workload.tokens(1) == 32  # the largest power of two


def test_without_transformers_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(hugging_face.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r'needs transformers.* pip install "steplab\[hf\]"'):
        requested_workload("hf:llama")

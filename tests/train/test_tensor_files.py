import pytest
import torch

hypothesis = pytest.importorskip("hypothesis")
safetensors = pytest.importorskip("safetensors.torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.train.tensor_files import CODES, write_tensors


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(CODES)), st.lists(st.integers(0, 4), max_size=3))))
def test_the_library_reads_what_was_written(tmp_path_factory, kinds):
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    torch.manual_seed(len(kinds))
    tensors = {
        f'layer.{i}/\u00e9"': torch.randint(2, tuple(shape)).to(dtype)
        for i, (dtype, shape) in enumerate(kinds)
    }
    seal = write_tensors(path, tensors)
    read = safetensors.load_file(path)
    assert seal.size == path.stat().st_size
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(read[name].double(), tensor.double())


@pytest.mark.parametrize("view", [lambda t: t.T, lambda t: t[1:, ::2], lambda t: t.expand(2, 4, 6)])
def test_views_are_written_as_they_look(tmp_path, view):
    tensor = view(torch.arange(24.0).reshape(4, 6))
    write_tensors(tmp_path / "x", {"a": tensor, "b": tensor})
    read = safetensors.load_file(tmp_path / "x")
    assert torch.equal(read["a"], tensor) and torch.equal(read["b"], tensor)


def test_an_existing_file_is_not_overwritten(tmp_path):
    write_tensors(tmp_path / "x", {})
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", {})

"""A process that believes it has a card: tensors without data on a GPU that need not be there.

The step is assembled and run by the same code as ever. What decides which kernels run (the card's
capability, whether there is a GPU at all) is answered for the card that is asked about; tensors
have shapes and devices, but no memory.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from steplab.estimate.fake_autocast import FakeAutocast
from steplab.hardware.catalog import Card
from steplab.kernels import attention, triton_runtime
from steplab.kernels.attention import cudnn
from steplab.parallel import mesh, sharding
from steplab.parallel.experts import Exchange
from steplab.step import assemble

DEVICE = torch.device("cuda", 0)
MAKE_MESH = "init_device_mesh"
META = torch.device("meta")
Launch = Callable[[str, list[Any]], None]  # a Triton kernel's name and its arguments


class FakeCardMode(FakeTensorMode):
    """FakeTensorMode that also works where torch was built without CUDA.

    Autograd's engine asks the device of every tensor for its streams, and a build without CUDA has
    none. So torch's C++ side is told that tensors are on the device "meta", which has no streams;
    Python code, and the keys by which autocast and autograd dispatch, see the GPU.
    """

    avoid_device_init = True

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer for the device; the rest is FakeTensorMode's."""
        if func is torch.ops.prim.device.default:
            return META
        options = dict(kwargs or {})
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if func is torch.ops.aten._pin_memory.default:
            return args[0]
        device = options.get("device")
        if device is not None and device.type == "meta":
            options["device"] = DEVICE
        if func is torch.ops.aten._to_copy.default and _is_there(args[0], options):
            func, options = torch.ops.aten.alias.default, {}
        return super().dispatch(func, types, args, options)


def _is_there(tensor: FakeTensor, options: Mapping[str, Any]) -> bool:
    """Whether `to` would copy nothing: C++ takes every tensor for one on another device."""
    device, dtype = options.get("device"), options.get("dtype")
    if device is None or device.type != tensor.fake_device.type:
        return False
    layout = options.get("memory_format") in (None, torch.preserve_format)
    return layout and dtype in (None, tensor.dtype)


# One kernel on a GPU. Where torch was built without CUDA it would be taken apart.
WHOLE_ON_GPU = ("silu_backward", "mish_backward")


def _keep_whole() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name in WHOLE_ON_GPU:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _never_called, "CUDA")
    return library


def _never_called(*args: Any) -> None:
    raise AssertionError("tensors without data run no kernel")


class FakeStream:
    """Stands in for a CUDA stream: it has a number, and orders nothing by itself."""

    def __init__(self, ledger: Any, number: int) -> None:
        self.ledger = ledger
        self.number = number
        self.cuda_stream = number
        self.stream_id = number
        self.device = DEVICE
        self.device_index = 0
        self.device_type = 1

    def record_event(self, event: Any = None) -> Any:
        """Note how far this stream is."""
        event = event or FakeEvent(self.ledger)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """Let what follows wait for the event."""
        if event.mark is not None:
            self.ledger.wait(self.number, event.mark)

    def wait_stream(self, other: FakeStream) -> None:
        """Let what follows wait for all that the other stream has so far."""
        self.ledger.wait(self.number, self.ledger.mark(other.number))

    def synchronize(self) -> None:
        """Nothing runs."""

    def query(self) -> bool:
        """Nothing runs."""
        return True


class FakeEvent:
    """Stands in for a CUDA event."""

    def __init__(self, ledger: Any) -> None:
        self.ledger = ledger
        self.mark: Any = None

    def record(self, stream: FakeStream | None = None) -> None:
        """Note how far the stream is."""
        number = self.ledger.stream if stream is None else stream.number
        self.mark = self.ledger.mark(number)

    def wait(self, stream: FakeStream | None = None) -> None:
        """Let a stream wait."""
        number = self.ledger.stream if stream is None else stream.number
        if self.mark is not None:
            self.ledger.wait(number, self.mark)

    def synchronize(self) -> None:
        """Nothing runs."""

    def query(self) -> bool:
        """Nothing runs."""
        return True


@contextlib.contextmanager
def fake_card(card: Card, ledger: Any) -> Iterator[FakeCardMode]:
    """Pretend that `card` is here, and run what is inside on tensors without data.

    `ledger` is told of streams, of what waits for what, and of kernels that Triton launches.
    """
    answers = [*_device_answers(card, ledger), *_library_answers()]
    with contextlib.ExitStack() as pretended:
        for owner, name, answer in answers:
            pretended.enter_context(mock.patch.object(owner, name, answer, create=True))
        # These read the numbers of ranks, which are data.
        for owner, name in (
            (mesh, MAKE_MESH),
            (sharding, MAKE_MESH),
            (DeviceMesh, "__init__"),
            (DeviceMesh, "__getitem__"),
        ):
            real = with_data(getattr(owner, name))
            pretended.enter_context(mock.patch.object(owner, name, real))
        if triton_runtime.HAS_TRITON:
            from triton.runtime.jit import JITFunction

            def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
                ledger.launched(kernel.fn.__name__, args)

            pretended.enter_context(mock.patch.object(JITFunction, "run", launch))
        pretended.callback(_keep_whole()._destroy)
        with FakeCardMode(allow_non_fake_inputs=True) as mode:
            yield mode


Answer = tuple[Any, str, Any]  # whose attribute, its name, and what it is meanwhile


def _device_answers(card: Card, ledger: Any) -> list[Answer]:
    """Return what torch.cuda says of a card that is not there."""
    return [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "_exchange_device", lambda index: 0),
        (torch.cuda, "_maybe_exchange_device", lambda index: 0),
        (torch.cuda, "get_device_capability", lambda device=None: card.board.capability),
        (torch.cuda, "get_device_name", lambda device=None: card.name),
        (torch.cuda, "get_device_properties", lambda device=None: properties(card)),
        (torch.cuda, "is_bf16_supported", lambda *a, **k: card.board.capability >= (8, 0)),
        (torch.cuda, "manual_seed", lambda seed: None),
        (torch.cuda, "manual_seed_all", lambda seed: None),
        (torch.cuda, "get_rng_state", lambda device="cuda": torch.empty(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda state, device="cuda": None),
        (torch.cuda, "Stream", lambda *a, **k: ledger.new_stream()),
        (torch.cuda, "Event", lambda *a, **k: FakeEvent(ledger)),
        (torch.cuda, "current_stream", lambda device=None: ledger.streams[ledger.stream]),
        (torch.cuda, "default_stream", lambda device=None: ledger.streams[0]),
        (torch.cuda, "stream", ledger.on_stream),
        (torch.cuda, "set_stream", ledger.set_stream),
    ]


def _library_answers() -> list[Answer]:
    """Return what torch would ask a real tensor or a real GPU."""
    optimizer = sys.modules["torch.optim.optimizer"]  # torch.optim has no attribute of that name
    return [
        # torch updates lists of tensors at once where their class is one that it knows.
        (optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, FakeTensor]),
        (torch.nn.utils.clip_grad, "_has_foreach_support", lambda tensors, device: True),
        (torch.version, "cuda", torch.version.cuda or "13.0"),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (cudnn, "HAS_CUDNN", True),
        # nn.GRU asks where its weights move; a build without cuDNN would warn.
        (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
        (torch, "autocast", FakeAutocast),
        (torch.amp, "autocast", FakeAutocast),
        (torch.nn.Module, "_apply", convert),
        (torch.nn.functional, "scaled_dot_product_attention", attend),
        (Exchange, "read_counts", even_counts),
        # Batches without data are alike: those of a thousand other ranks need not be drawn.
        (assemble, "islice", lambda stream, *of_rank: stream),
        # Rates are read once, when they move to the device, and have no values here.
        (assemble, "_reads_rates_on_device", lambda parts, optimizer: False),
        (FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
        (_fsdp_param, "_chunk_with_empty", chunk),
        (DTensor, "device", property(lambda t: t._local_tensor.device)),
        (FakeTensor, "is_cuda", property(lambda t: t.fake_device.type == "cuda")),
        (FakeTensor, "is_meta", property(lambda t: t.fake_device.type == "meta")),
        (FakeTensor, "pin_memory", lambda tensor, *a: tensor),
        (FakeTensor, "to", _to),
        (FakeTensor, "cuda", lambda tensor, *a, **k: tensor.to(DEVICE)),
        (FakeTensor, "record_stream", lambda tensor, stream: None),
        (torch.Tensor, "data_ptr", _address),
    ]


def even_counts(
    exchange: Exchange, to_PHL: Tensor, from_PHL: Tensor, rows: Sequence[int]
) -> list[list[list[int]]]:
    """Return how many rows go to and come from every rank when all experts are liked equally."""
    shares = [[count // exchange.ranks] * exchange.ranks for count in rows]
    for share, count in zip(shares, rows, strict=True):
        share[0] += count - sum(share)
    return [shares, shares]


def convert(
    module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Do what `module.to` does; torch would swap tensors, which weak references forbid."""
    changed: dict[Tensor, Any] = {}
    for owner in module.modules() if recurse else [module]:
        for held in (owner._parameters, owner._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if tensor not in changed:
                    with torch.no_grad():
                        new = change(tensor)
                    same = new.dtype == tensor.dtype and new.device == tensor.device
                    is_weight = isinstance(tensor, nn.Parameter)
                    wrapped = nn.Parameter(new, tensor.requires_grad) if is_weight else new
                    changed[tensor] = tensor if same else wrapped
                held[name] = changed[tensor]
    return module


def chunk(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """Return `count` chunks, the last ones empty; torch makes a tensor of its own for each empty.

    On a thousand ranks these are most of the tensors of a model.
    """
    chunks = list(tensor.chunk(count, dim))
    return chunks + [chunks[0].new_empty(0)] * (count - len(chunks))


def with_data(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sees tensors with data, whatever is pretended around it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


_real_to = torch.Tensor.to


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Name the device by its number: torch would ask the driver which one is the present one."""
    args = tuple(DEVICE if arg in ("cuda", torch.device("cuda")) else arg for arg in args)
    if kwargs.get("device") in ("cuda", torch.device("cuda")):
        kwargs["device"] = DEVICE
    return _real_to(tensor, *args, **kwargs)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's scaled_dot_product_attention with the kernel that it takes on the card.

    torch asks the device, which C++ takes for one without kernels: the choice is made here, in
    torch's order (on Hopper cuDNN, flash, memory-efficient).
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    if query.ndim != 4 or key.dtype != query.dtype:
        return _real_attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if attn_mask is None and not dropout_p and scale is None:
        impl = attention.choose("auto", query, key, value, is_causal)
        return attention.attention(impl, query, key, value, is_causal)
    bias = (
        None
        if attn_mask is None
        else attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    )
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    found: Tensor = op(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return found


_real_attend = torch.nn.functional.scaled_dot_product_attention
_real_address = torch.Tensor.data_ptr


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage is; one without data has the number of its storage."""
    if isinstance(tensor, FakeTensor):
        return int(tensor.untyped_storage()._cdata)
    return int(_real_address(tensor))


def properties(card: Card) -> types.SimpleNamespace:
    """Return what torch tells about a device."""
    major, minor = card.board.capability
    return types.SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.board.memory_bytes,
        multi_processor_count=card.board.multiprocessors,
        L2_cache_size=50 * 2**20,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232448,
        gcnArchName="",
    )

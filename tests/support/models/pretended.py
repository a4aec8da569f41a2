"""A GPU that is not there. Its memory is the CPU's, but the host sees nothing of it until it has waited.

What PyTorch refuses on a GPU is refused: tensors of two devices in one operation, kernels over memory of the host. What makes the host wait
is noted (`waits`), and refused while a graph is captured. What is copied to the host behind its back is garbage there until an event that
was recorded later has been waited for. Graphs replay what was captured, with the numbers and over the memory of then; memory that was
allocated while they were captured is garbage whenever one of them begins.

Its memory is counted, and is no more than there is (`Memory`). A capture that is not ended properly leaves behind what it leaves in torch
(`CudaGraph`).

Kernels run in Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from banyan_runtime.model import capture, fused, reading, torch_forward
from banyan_runtime.model.attention import triton_paged
from banyan_runtime.model.kernels import dependent

DEVICE: Final = torch.device("cuda", 0)
CAPABILITY: Final = (8, 9)  # the interpreter has no programmatic dependent launch
MEMORY: Final = 1 << 34  # bytes
_BLOCK: Final = 512  # bytes, of which torch gives out whole ones

_COPIES: Final = {"aten::to", "aten::_to_copy", "aten::copy_"}
_LOOKS: Final = {  # of which the host wants to know something before it goes on
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::allclose",
    "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
}  # fmt: skip
# Without CUDA torch knows no guard of such devices, and refuses to name one in most operations.
_GUARD: Final = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""


class OnGpu(Tensor):
    """A tensor of the GPU: a shape without memory, which the host cannot read."""

    kept: Tensor
    _memory: Memory
    _key: int

    @staticmethod
    def __new__(cls, kept: Tensor, memory: Memory) -> OnGpu:
        own: OnGpu = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, kept.shape, strides=kept.stride(), storage_offset=kept.storage_offset(), dtype=kept.dtype, device=DEVICE
        )
        own.kept, own._memory = kept, memory
        own._key = memory.hold(kept)
        return own

    def __init__(self, kept: Tensor, memory: Memory) -> None:
        """For `__new__`."""

    def __del__(self) -> None:
        if hasattr(self, "_key"):  # else there was no memory for it
            self._memory.release(self._key)

    def data_ptr(self) -> int:
        return self.kept.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnGpu({self.kept!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the pretended GPU")


class Memory:
    """Bytes of the GPU: of what lies there, and what torch keeps in reserve for more, as if all of it could be used for anything. It
    gives the reserve back when it is told to, or when memory runs short."""

    def __init__(self, total: int = MEMORY) -> None:
        self.total = total
        self.foreign = 0  # of other processes, and of the driver
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self.most_taken = 0  # of the whole device, at any time
        self.underway: dict[tuple[int, int], _Graph] = {}  # captures, by the pools that they allocate from
        self._held: dict[int, tuple[int, int]] = {}  # by storage: its bytes, and how many hold it

    @property
    def free(self) -> int:
        return self.total - self.foreign - self.reserved

    def hold(self, tensor: Tensor) -> int:
        """Count its memory, if it is not counted yet; the result is to be released."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size, holders = self._held.get(key, (-(-storage.nbytes() // _BLOCK) * _BLOCK, 0))
        if not holders:
            room = self.total - self.foreign
            if self.allocated + size > room:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes of {room - self.allocated}.")
            self.allocated += size
            self.reserved = max(self.allocated, min(self.reserved, room))
            self.most_allocated = max(self.most_allocated, self.allocated)
            self.most_reserved = max(self.most_reserved, self.reserved)
            self.most_taken = max(self.most_taken, self.allocated + self.foreign)
        self._held[key] = size, holders + 1
        return key

    def release(self, key: int) -> None:
        size, holders = self._held[key]
        if holders > 1:
            self._held[key] = size, holders - 1
        else:
            del self._held[key]
            self.allocated -= size

    def empty_cache(self) -> None:
        if not self.underway:
            self.reserved = self.allocated

    def reset_peaks(self) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved


class Stream:
    """What is late is done when the host waits for it."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        self.late: list[Callable[[], object]] = []
        self._done = 0

    def take(self, work: Callable[[], object], *, late: bool) -> None:
        if late:
            self.late.append(work)
        else:
            work()

    def wait_stream(self, other: Stream) -> None:
        other.synchronize()

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.upto(len(self.late))

    @torch.inference_mode()
    def upto(self, count: int) -> None:
        for work in self.late[self._done : count]:
            work()
        self._done = max(self._done, count)


class Event:
    """Until it is recorded, nothing has to be waited for."""

    def __init__(self) -> None:
        self.synchronize: Callable[[], None] = lambda: None

    def record(self, stream: Stream | None = None) -> None:
        there = stream or torch.cuda.current_stream()
        assert isinstance(there, Stream)
        self.synchronize = partial(there.upto, len(there.late))


class _On:
    """Work for a stream. Whoever does not leave it stays there."""

    def __init__(self, gpu: PretendedGpu, stream: Stream) -> None:
        self._gpu = gpu
        self._stream = stream

    def __enter__(self) -> None:
        self._before, self._gpu.stream = self._gpu.stream, self._stream

    def __exit__(self, *_: object) -> None:
        self._gpu.stream = self._before


class CudaGraph:
    """As torch's: where the driver does not begin or end a capture, the allocator takes it to be underway, and keeps its memory. Of 2.13 it
    does not, but keeps the pool; of later ones neither."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu
        self._graph: _Graph | None = None
        self._taken = 0  # by the driver
        self._ended = False

    def capture_begin(self, pool: tuple[int, int], **_: object) -> None:
        gpu = self._gpu
        assert pool not in gpu.memory.underway, "already recording to the pool"
        gpu.memory.underway[pool] = graph = _Graph(gpu.graphs, gpu.memory)
        self._failing("begin", pool)
        self._pool, gpu.graph = pool, graph

    def capture_end(self) -> None:
        graph, self._gpu.graph = self._gpu.graph, None
        if self._gpu.torch == (2, 13):
            self._gpu.kept[self._pool] = end_allocating(self._gpu.memory, self._pool)
            self._failing("end", self._pool)
            del self._gpu.kept[self._pool]
        else:
            self._failing("end", self._pool)
            end_allocating(self._gpu.memory, self._pool)
        self._ended = True
        self._gpu.fails("instantiate")
        if self._gpu.memory.free < self._gpu.of_graph:
            raise RuntimeError("CUDA error: out of memory")
        assert graph is not None
        self._gpu.graphs.add(graph)
        self._taken = self._gpu.of_graph
        self._gpu.memory.foreign += self._taken
        self._graph = graph

    def _failing(self, moment: str, pool: tuple[int, int]) -> None:
        try:
            self._gpu.fails(moment)
        except RuntimeError:
            if self._gpu.torch >= (2, 14):
                end_allocating(self._gpu.memory, pool)
            raise

    def __del__(self) -> None:
        self._gpu.memory.foreign -= self._taken

    def pool(self) -> tuple[int, int]:
        if not self._ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def replay(self) -> None:
        assert self._graph is not None, "it was not captured"
        self._gpu.replays += 1
        self._graph.replay()


def end_allocating(memory: Memory, pool: tuple[int, int]) -> _Graph:
    if pool not in memory.underway:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    return memory.underway.pop(pool)


class PretendedGpu(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.waits: list[str] = []
        self.replays = 0
        self.graphs: WeakSet[_Graph] = WeakSet()  # which share the memory that was allocated while they were captured
        self.graph: _Graph | None = None  # that is captured
        self.fails: Callable[[str], None] = lambda moment: None  # at the moments of a capture: begin, end, instantiate
        self.of_graph = 0  # bytes that the driver takes for each
        self.torch = (2, 12)
        self.kept: dict[tuple[int, int], _Graph] = {}  # captures that nobody lets go of, by their pools, which hold their memory
        self._stream = self.stream = Stream()
        self._pinned: dict[int, Tensor] = {}  # by address; they stay, so that nothing else takes their place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name: str = func._schema.name
        if name in ("aten::pin_memory", "aten::_pin_memory"):
            return self._pin(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in given if isinstance(tensor, OnGpu)]
        if name in _COPIES:
            target = _named(args, kwargs) or (args[0].device if given else None)
            source = args[1] if name == "aten::copy_" else args[0]
            if target is not None and target.type != source.device.type:
                return self._travel(name, func, args, kwargs, source, target)
        onto = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device) and leaf.type == "cuda"]
        if not here and not onto:
            return func(*args, **kwargs)
        for tensor in given:
            assert isinstance(tensor, OnGpu) or tensor.ndim == 0, f"{name} over tensors of two devices, {DEVICE} and cpu"
        if name in _LOOKS or _looks(name, args, kwargs):
            self._wait(name)
        return self.compute(func, args, kwargs)

    def compute(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What `call` gives over the memory of the tensors, on the GPU. The tensors that it was given are the same ones behind it."""
        args, kwargs = tree_map(_on_cpu, (args, kwargs))
        known = {id(leaf.kept): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnGpu)}
        plain_args, plain_kwargs = tree_map(_kept, (args, kwargs))
        out = call(*plain_args, **plain_kwargs)
        if self.graph is not None:
            self.graph.note(call, plain_args, plain_kwargs, out)
        return tree_map(
            lambda leaf: known[id(leaf)] if id(leaf) in known else self._on_gpu(leaf) if isinstance(leaf, Tensor) else leaf, out
        )

    def _on_gpu(self, kept: Tensor) -> OnGpu:
        return OnGpu(kept, self.memory)

    def _travel(self, name: str, func: Any, args: Any, kwargs: Any, source: Tensor, target: torch.device) -> Any:
        """A copy from one device to the other."""
        assert self.graph is None, f"{name} between devices while a graph is captured"
        asked = bool(kwargs.get("non_blocking") or any(leaf is True for leaf in args[2:3]))
        if target.type == "cuda":
            if not asked or source.untyped_storage().data_ptr() not in self._pinned:
                self._wait(f"{name} to the GPU, from memory that is not pinned or without non_blocking")
            if name == "aten::copy_":
                there = args[0].kept
                self.stream.take(lambda: there.copy_(source), late=self.stream is not self._stream)
                return args[0]
            copied = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
            return self._on_gpu(copied.clone() if copied is source else copied)
        there = _kept(source)
        if name == "aten::copy_":
            self._wait(f"{name} from the GPU")
            return args[0].copy_(there)
        found = func(there, *args[1:], **kwargs).clone()
        if not asked:
            self._wait(f"{name} from the GPU")
            return found
        arriving = torch.empty_like(found)
        _spoil(arriving)
        self.stream.take(lambda: arriving.copy_(found), late=True)
        return arriving

    def launch(self, executor: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A kernel of Triton's."""
        letters: list[Tensor] = []  # memory of the host that is pinned
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, OnGpu):
                assert leaf.untyped_storage().data_ptr() in self._pinned, f"{executor.fn.__name__} over memory of the host"
                letters.append(leaf)

        def over(*args: Any, **kwargs: Any) -> None:
            before = [letter.clone() for letter in letters]
            run(executor, *args, **kwargs)
            for letter, was in zip(letters, before, strict=True):
                written = (found := letter.clone()) != was
                if written.any():
                    _spoil(spoiled := torch.empty_like(found))
                    letter.copy_(torch.where(written, spoiled, found))
                    self.stream.take(partial(_arrive, letter, written, found), late=True)

        self.compute(over, args, kwargs)

    def apart(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a library does with the tensors in a way of its own, which is not looked at."""
        assert self.graph is None, f"{call} while a graph is captured"
        return call(*tree_map(_kept, args), **tree_map(_kept, kwargs))

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _wait(self, what: str) -> None:
        assert self.graph is None, f"{what} while a graph is captured"
        self.waits.append(what)


class _Graph:
    def __init__(self, others: WeakSet[_Graph], memory: Memory) -> None:
        self._others = others
        self._memory = memory
        self._held: list[int] = []
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []

    def note(self, call: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        made = _made((args, kwargs), out)
        self._held += [self._memory.hold(tensor) for tensor in made]
        self._calls.append((call, args, kwargs, made))

    def replay(self) -> None:
        for graph in list(self._others):
            for _, _, _, made in graph._calls:
                for tensor in made:
                    _spoil(tensor)
        for call, args, kwargs, made in self._calls:
            for there, found in zip(made, _made((args, kwargs), call(*args, **kwargs)), strict=True):
                there.copy_(found)

    def __del__(self) -> None:
        for key in self._held:
            self._memory.release(key)


def _arrive(letter: Tensor, written: Tensor, found: Tensor) -> None:
    letter.copy_(torch.where(written, found, letter))


def _made(given: Any, out: Any) -> list[Tensor]:
    """What came out with memory of its own."""
    known = {_address(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and _address(leaf) not in known]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _kept(leaf: Any) -> Any:
    return leaf.kept if isinstance(leaf, OnGpu) else leaf


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _named(args: Any, kwargs: Any) -> torch.device | None:
    return next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)), None)


def _looks(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the host must know some numbers to go on, of operations that do not always need it."""
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name == "aten::repeat_interleave" and kwargs.get("output_size") is None


def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> Iterator[PretendedGpu]:
    """As if torch had CUDA and found one GPU."""
    from triton.runtime.interpreter import GridExecutor

    _guard(scratch)
    gpu, run, pools = PretendedGpu(), GridExecutor.__call__, count(1)
    memory = gpu.memory

    class OwnGraph(CudaGraph):  # a class: others say in annotations that they may have one
        def __init__(self) -> None:
            super().__init__(gpu)

    def properties(device: object = None) -> SimpleNamespace:
        return SimpleNamespace(
            total_memory=memory.total, name="pretended", major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=4
        )

    for name, value in {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": properties,
        "mem_get_info": lambda device=None: (memory.free, memory.total),
        "memory_allocated": lambda device=None: memory.allocated,
        "max_memory_allocated": lambda device=None: memory.most_allocated,
        "memory_reserved": lambda device=None: memory.reserved,
        "max_memory_reserved": lambda device=None: memory.most_reserved,
        "reset_peak_memory_stats": lambda device=None: memory.reset_peaks(),
        "empty_cache": memory.empty_cache,
        "synchronize": lambda device=None: gpu.stream.synchronize(),
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "current_stream": lambda device=None: gpu.stream,
        "current_device": lambda: 0,
        "stream": partial(_On, gpu),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": OwnGraph,
        "graph_pool_handle": lambda: (0, next(pools)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, call in {
        "_host_emptyCache": lambda: None,
        "_cuda_endAllocateToPool": lambda device, pool: gpu.kept.update({pool: end_allocating(memory, pool)}),
        "_cuda_releasePool": lambda device, pool: gpu.kept.pop(pool),
    }.items():
        monkeypatch.setattr(torch._C, name, call, raising=False)
    tensor = torch.tensor  # which asks nobody but torch for memory
    monkeypatch.setattr(torch, "tensor", lambda data, *, device=None, **named: tensor(data, **named).to(device or "cpu"))
    monkeypatch.setattr(torch, "Generator", _Generator)
    monkeypatch.setattr(capture, "_WARM_UPS", 1)  # each takes long here
    monkeypatch.setattr(capture, "_TORCH", gpu.torch)
    monkeypatch.setattr(reading, "READERS", 1)
    monkeypatch.setattr(reading, "Thread", partial(_Thread, gpu))
    monkeypatch.setattr(GridExecutor, "__call__", lambda executor, *args, **kwargs: gpu.launch(executor, run, args, kwargs))
    caches = (dependent.options, capture._stream)
    for cache in caches:
        cache.cache_clear()
    try:
        with gpu:
            yield gpu
    finally:
        for cache in caches:
            cache.cache_clear()


def small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as in `test_triton.py`."""
    monkeypatch.setattr(torch_forward, "_MANY", 4)
    for name, value in {"KEYS": 16, "STRETCH": 64, "TOGETHER": 2, "PROGRAMS": 32}.items():
        monkeypatch.setattr(triton_paged, name, value)


def only_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels of ours but for attention, small ones, where it is asked for: the others take long here."""
    small_kernels(monkeypatch)
    monkeypatch.setattr(fused, "supports", lambda *_: False)
    monkeypatch.setattr(triton_paged.TritonAttention, "_compile", lambda self: None)  # nobody waits for a compiler here


class _Thread(Thread):
    """Computes on the GPU too: what torch calls is a thread's own."""

    def __init__(self, gpu: PretendedGpu, **named: Any) -> None:
        super().__init__(**named)
        self._gpu = gpu

    def run(self) -> None:
        with self._gpu:
            super().run()


class _Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls, "cpu")


def _guard(scratch: Path) -> None:
    """Once for the process."""
    if _guard.there:  # type: ignore[attr-defined]
        return
    source, library = scratch / "guard.cpp", scratch / "guard.so"
    source.write_text(_GUARD)
    torch_folder = Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_folder}/include", str(source), "-o", str(library)]
    subprocess.run([*command, f"-L{torch_folder}/lib", "-lc10"], check=True, timeout=120)
    ctypes.CDLL(str(library))
    _guard.there = True  # type: ignore[attr-defined]


_guard.there = False  # type: ignore[attr-defined]

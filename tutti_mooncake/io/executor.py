"""Choice of executor, and the mover: registered tensors plus the native lanes that fill and drain them."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tutti_mooncake import _native
from tutti_mooncake.errors import DeviceUnavailable, Status, TensorError
from tutti_mooncake.geometry import Geometry
from tutti_mooncake.io.device import DeviceFile, all_in_memory

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
FOREVER = -1.0
# Of a thread block of the I/O kernel: issuing warps, and warps that move what was read or is to be written. Measured (docs/gio_uring.md):
# with more moving warps their own queue on PCIe delays the issuing ones; with fewer they can't fill it.
_GPU_ISSUERS = 2
_GPU_MOVERS = 6
_GPU_LANES = 32  # commands in flight per issuing warp, as far as pinned_bytes allows
_GPU_IOCBS = 32
_IO_STREAM = 0  # CUstream that I/O kernels run on; 0 = one of the highest priority, made by each executor
_TORCH_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def choose_executor(wanted: str, *, in_memory: bool = False, on_gpu: bool = False) -> tuple[str, str]:
    """(kind, reason): `wanted`, or for "auto" the best that works here, found by trying. Both are text for people.

    `in_memory`: all devices are files in memory, as on tmpfs. io_uring hands their I/O to kernel threads, and the bytes are in another
    processor's cache when their checksum is taken; plain calls measured 1.1 to 1.2 times as fast. `on_gpu`: of the engine's tensors. Raises
    TensorError when they are on a GPU and what is wanted can't reach it.
    """
    if on_gpu:
        if wanted not in ("auto", "uring-gpu", "nvme-model"):
            raise TensorError(
                f"the KV tensors are on a GPU, and the executor {wanted} moves host memory; set executor to auto or uring-gpu"
            )
        refusal = _native.probe_cuda()
        if refusal:
            raise TensorError(f"the KV tensors are on a GPU that tutti-mooncake can't use: {refusal}")
        return ("uring-gpu", "the KV tensors are on a GPU") if wanted == "auto" else (wanted, "chosen by configuration")
    if wanted == "uring-gpu":
        raise TensorError("the executor uring-gpu moves GPU memory, and the KV tensors are in host memory; set executor to auto")
    if wanted in ("posix", "gio-threads", "nvme-model"):
        return wanted, "chosen by configuration"
    refusal = _native.probe_uring()
    if refusal:
        return "posix", f"io_uring is refused: {refusal}"
    if wanted == "uring":
        return "uring", "chosen by configuration"
    if in_memory:
        return "posix", "files in memory are copied by the processor, and plain calls do that with less work"
    return "uring", "io_uring works in this process"


def default_lanes(kind: str, *, in_memory: bool = False) -> int:
    """Threads that move bytes.

    uring: half of the cores (2 to 16). posix: twice the cores, as they wait for the device; where they copy themselves, three quarters.
    """
    cores = len(os.sched_getaffinity(0))
    if kind == "uring":
        return max(2, min(16, cores // 2))
    return max(2, min(32, cores * 3 // 4)) if in_memory else max(4, min(32, 2 * cores))


@dataclass(frozen=True)
class ExecutorSettings:
    """What of the configuration an executor needs; names and meaning as in `config.StoreConfig`."""

    executor: str = "auto"
    lanes: int = 0
    queue_depth: int = 32
    register_buffers: bool = True
    pinned_bytes: int = 256 << 20
    io_blocks: int = 8
    nvme_pointers: str = "sgl"


class Mover:
    """Moves blocks between one rank's KV tensors and the devices. Thread-safe once register() has returned."""

    def __init__(
        self,
        layout: _native.Layout,
        devices: Sequence[DeviceFile],
        settings: ExecutorSettings,
        *,
        slot_table: _native.SlotTable,
        first_sum: int,
        faults: _native.FaultInjector | None = None,
    ) -> None:
        """`first_sum`: position of the rank's first checksum among those of a slot."""
        self._layout = layout
        self._devices = devices
        self._settings = settings
        self._slot_table = slot_table
        self._first_sum = first_sum
        self._faults = faults
        self._executor: _native.Executor | None = None
        self._memory_align = max(device.memory_align for device in devices)
        self._tensors: list[Any] = []
        self._gpu: Any = None  # torch's device of the tensors, if it is one
        self.executor = settings.executor
        self.executor_reason = "chosen when tensors are registered"
        self.blocks = 0
        self.groups = 1

    @property
    def registered(self) -> bool:
        """True once register() has succeeded."""
        return bool(self._tensors)

    def register(self, tensors: Sequence[torch.Tensor], geometry: Geometry, groups: Sequence[int] | None = None) -> None:
        """Takes one tensor per object index, all in host memory or all on one GPU; keeps a reference. Raises TensorError naming the first
        that doesn't fit.

        `groups`: which of the engine's block tables each object follows (default: one table for all).
        """
        if self.registered:
            raise TensorError("KV tensors are registered already; a store serves one set of tensors")
        if len(tensors) != geometry.objects_per_block:
            raise TensorError(
                f"{len(tensors)} tensors for {geometry.objects_per_block} objects per block "
                f"(kv_factor {geometry.kv_factor} x {geometry.layers} layers)"
            )
        for index, tensor in enumerate(tensors):
            _check_tensor(index, tensor, geometry)
        where = {str(tensor.device) for tensor in tensors}
        if len(where) != 1:
            raise TensorError(f"the tensors are on different devices: {', '.join(sorted(where))}; a store serves one")
        blocks = {int(tensor.shape[0]) for tensor in tensors}
        if len(blocks) != 1:
            raise TensorError(f"tensors have different numbers of blocks: {sorted(blocks)}")
        groups = [0] * len(tensors) if groups is None else groups
        if len({(tensor.data_ptr(), group) for tensor, group in zip(tensors, groups, strict=True)}) != len(tensors):
            raise TensorError("the same memory is given for two objects; each object index needs a tensor of its own")
        bases = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
        strides = np.array([tensor.stride(0) * tensor.element_size() for tensor in tensors], dtype=np.uint64)
        self.blocks = blocks.pop()
        self.groups = max(groups) + 1
        executor = self._make(tensors[0].device)
        try:
            executor.start(bases, strides, np.full(len(tensors), self.blocks, dtype=np.uint64), np.asarray(groups, dtype=np.uint32))
        except ValueError as error:
            raise TensorError(f"the executor {self.executor} can't move these tensors: {error}") from error
        except RuntimeError as error:
            raise DeviceUnavailable(
                f"the executor {self.executor} can't start: {error}; raise the limits of open files and memory, or lower lanes"
            ) from error
        self._executor = executor
        self._tensors = list(tensors)
        unaligned = 0 if self._gpu is not None else sum(base % self._memory_align != 0 for base in bases.tolist())
        if unaligned:
            logger.info(
                "%d of %d KV tensors don't begin at a multiple of %d bytes, as the device wants: their bytes are copied on the way",
                unaligned,
                len(tensors),
                self._memory_align,
            )

    def _make(self, device: torch.device) -> _native.Executor:
        settings = self._settings
        in_memory = all_in_memory(self._devices)
        self.executor, self.executor_reason = choose_executor(settings.executor, in_memory=in_memory, on_gpu=device.type == "cuda")
        files = [(one.direct_fd, one.memory_align, one.offset_align) for one in self._devices]
        if self.executor in ("uring", "posix"):
            lanes = settings.lanes or default_lanes(self.executor, in_memory=in_memory)
            return _native.LaneExecutor(
                self._layout, files, self.executor, lanes, settings.queue_depth, settings.register_buffers, self._slot_table, self._faults
            )
        gpu = -1
        if device.type == "cuda":
            self._gpu = device
            gpu = device.index or 0
        # How the files are read on the host's side: as it would be for host tensors.
        served_by = choose_executor("auto", in_memory=in_memory)[0]
        return _native.GioExecutor(
            self._layout,
            files,
            gpu=gpu,
            stream=_IO_STREAM,
            model=self.executor == "nvme-model",
            prp=settings.nvme_pointers == "prp",
            uring=served_by == "uring",
            threads=settings.lanes or default_lanes(served_by, in_memory=in_memory),
            queue_depth=settings.queue_depth,
            pinned_bytes=settings.pinned_bytes,
            blocks=settings.io_blocks if gpu >= 0 else 1,
            issuers=_GPU_ISSUERS if gpu >= 0 else 2,
            movers=_GPU_MOVERS if gpu >= 0 else 1,
            lanes=_GPU_LANES,
            iocbs=_GPU_IOCBS if gpu >= 0 else 4,
            table=self._slot_table,
            faults=self._faults,
        )

    def submit(
        self,
        *,
        write: bool,
        slots: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint32],
        rots: npt.NDArray[np.uint8],
        blocks: npt.NDArray[np.uint32],
        deadline_seconds: float,
    ) -> _native.Plan:
        """Enqueues a plan and returns at once. Not to be called once stop() has begun: the store's lock sees to that.

        `blocks`: of shape (groups, n) or flat in that order; the others have one entry per block.
        """
        executor = self._running()
        flat = np.ascontiguousarray(blocks).reshape(-1)
        if self._gpu is None:
            return executor.submit(write, slots, generations, rots, flat, deadline_seconds)
        # What the engine has given its stream so far may still use these blocks.
        stream = importlib.import_module("torch").cuda.current_stream(self._gpu).cuda_stream
        return executor.submit(write, slots, generations, rots, flat, deadline_seconds, stream)

    def seal(self, plan: _native.Plan) -> npt.NDArray[np.uint8]:
        """Writes the checksums of a write plan that is done; its statuses."""
        statuses = plan.statuses()
        written = np.flatnonzero(statuses == Status.OK).astype(np.uint32)
        statuses[written] = self._slot_table.write_sums(plan, written, self._first_sum)
        return statuses

    def stop(self, grace_seconds: float) -> None:
        """Ends running plans after at most `grace_seconds`, joins the lanes and lets the tensors go."""
        if self._executor is not None:
            self._executor.stop(grace_seconds)
        self._tensors = []

    def counters(self) -> dict[str, int]:
        """Counters of the lanes."""
        return dict(self._executor.stats()) if self._executor is not None else {}

    def stats(self) -> dict[str, int | str]:
        """The counters, and why the lanes run without registered buffers, if they do."""
        return {**self.counters(), "executor_note": self._executor.note if self._executor is not None else ""}

    def _running(self) -> _native.Executor:
        if self._executor is None:
            raise TensorError("no KV tensors are registered")
        return self._executor


def _check_tensor(index: int, tensor: torch.Tensor, geometry: Geometry) -> None:
    where = f"tensors[{index}]"
    if tensor.device.type not in ("cpu", "cuda"):
        raise TensorError(f"{where} is on {tensor.device}; KV tensors are in host memory or on a CUDA device")
    if tensor.dim() < 2 or tensor.shape[0] < 1:
        raise TensorError(f"{where} has shape {tuple(tensor.shape)}; the first dimension must be the engine's blocks")
    if not tensor[0].is_contiguous():
        raise TensorError(f"{where}: one block, shape {tuple(tensor.shape[1:])} strides {tensor.stride()[1:]}, is not contiguous")
    named = str(tensor.dtype).removeprefix("torch.")
    if named != "uint8" and named != _TORCH_NAMES.get(geometry.dtype, geometry.dtype):
        raise TensorError(f"{where} has dtype {named}, the geometry says {geometry.dtype}; give that, or bytes (uint8)")
    size = tensor[0].numel() * tensor.element_size()
    if size != geometry.object_bytes:
        raise TensorError(f"{where}: one block has {size} bytes, the geometry says object_bytes {geometry.object_bytes}")
    if tensor.shape[0] > 1 and tensor.stride(0) * tensor.element_size() < size:
        raise TensorError(f"{where}: blocks overlap (stride {tensor.stride(0) * tensor.element_size()} bytes for objects of {size})")

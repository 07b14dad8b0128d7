"""The SM partition on a real GPU: sizes, an I/O kernel beside a saturated compute domain, right results, closing.

    python -m pytest tests/gpu/test_partition.py -s          # prints the measured times

Each time is that of one small kernel on an otherwise empty stream, from launch to its end as the host sees it. "Saturated": large matmuls
are queued without a pause on another stream, for longer than the measurement takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tutti_mooncake.io.partition import SmPartition

torch = pytest.importorskip("torch", reason="needs an NVIDIA GPU and PyTorch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MATMUL = 16384
ROUNDS = 20


@pytest.fixture
def partition() -> Iterator[SmPartition]:
    torch.cuda.init()
    with SmPartition() as made:
        if made.kind != "green":
            pytest.skip(f"needs green contexts: {made.reason}")
        yield made
        release_streams()


def release_streams() -> None:
    """Frees what PyTorch keeps for the streams, which end next: cached blocks and cuBLAS workspaces."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def stream_of(handle: int | None) -> Any:
    assert handle
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", 0))


def small_kernel_microseconds(stream: Any, word: Any, busy: Any) -> list[float]:
    """Times of single small kernels on `stream`, each taken while `busy` still has queued work."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        with torch.cuda.stream(stream):
            word.add_(1)
        stream.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        if busy is not None:
            assert not busy.query(), "the other stream ran dry, so this was not measured beside load"
    return times


def measured(label: str, stream: Any, load_stream: Any) -> float:
    """Median time of a small kernel on `stream` beside matmuls on `load_stream` (None = on an idle GPU)."""
    word = torch.zeros(1024, device="cuda")
    with torch.cuda.stream(stream):
        word.add_(1)  # the first use of a stream and kernel loads code
    torch.cuda.synchronize()
    left = right = result = None
    if load_stream is not None:
        left = torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16)
        right = torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16)
        result = torch.empty_like(left)
        torch.cuda.synchronize()
        with torch.cuda.stream(load_stream):
            for _ in range(120):  # about 12 ms each on an H200
                torch.mm(left, right, out=result)
        time.sleep(0.05)  # no point to wait for: the load must have filled every SM that it may use
    times = small_kernel_microseconds(stream, word, load_stream)
    torch.cuda.synchronize()
    assert int(word[0].item()) == ROUNDS + 1
    median = statistics.median(times)
    print(f"\n{label}: median {median:.0f} us, least {min(times):.0f}, most {max(times):.0f}, {ROUNDS} kernels")
    return median


def test_the_sizes_are_the_devices(partition: SmPartition) -> None:
    total = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"\n{torch.cuda.get_device_name(0)}: {total} SMs = {partition.io_sms} I/O + {partition.compute_sms} compute")
    assert partition.device_sms == total
    assert partition.io_sms == 8 and partition.compute_sms == total - 8
    if "H200" in torch.cuda.get_device_name(0):
        assert (partition.io_sms, partition.compute_sms) == (8, 124)


def test_an_io_kernel_ends_quickly_beside_a_saturated_compute_domain(partition: SmPartition) -> None:
    io, compute = stream_of(partition.io_stream()), stream_of(partition.compute_stream())
    idle = measured("I/O stream, idle GPU", io, None)
    partitioned = measured("I/O stream, compute domain saturated", io, compute)
    shared = measured("ordinary stream beside a saturated ordinary stream", torch.cuda.Stream(), torch.cuda.Stream())
    print(f"\nordinary / partitioned = {shared / partitioned:.0f}, partitioned / idle = {partitioned / idle:.1f}")
    assert partitioned < 500, "an I/O kernel waited for compute"
    # How long an ordinary stream waits depends on how long the load's blocks run: reported, not judged.


def test_work_on_the_compute_stream_gives_right_results(partition: SmPartition) -> None:
    torch.manual_seed(1)
    compute, io = stream_of(partition.compute_stream()), stream_of(partition.io_stream())
    left = torch.randint(-4, 5, (2048, 2048), device="cuda").to(torch.bfloat16)  # small integers: every sum is exact in float32
    right = torch.randint(-4, 5, (2048, 2048), device="cuda").to(torch.bfloat16)
    expected = left.float() @ right.float()
    torch.cuda.synchronize()
    with torch.cuda.stream(compute):
        product = left.float() @ right.float()
        done = torch.cuda.Event()
        done.record()
    with torch.cuda.stream(io):
        io.wait_event(done)
        copied = product.clone()
    io.synchronize()
    assert torch.equal(copied, expected)
    query = torch.randn(1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16)
    reference = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(compute):
        attention = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    compute.synchronize()
    torch.testing.assert_close(attention, reference)


def test_it_can_be_closed_and_made_again() -> None:
    torch.cuda.init()
    before = torch.cuda.mem_get_info()[0]
    for io_sms in (8, 16, 8):
        with SmPartition(io_sms=io_sms) as partition:
            if partition.kind != "green":
                pytest.skip(f"needs green contexts: {partition.reason}")
            assert partition.io_sms == io_sms
            with torch.cuda.stream(stream_of(partition.compute_stream())):
                torch.ones(1024, device="cuda").sum()
            release_streams()
        assert partition.io_stream() is None
        partition.close()
    assert float(torch.ones(1024, device="cuda").sum().item()) == 1024.0  # PyTorch goes on in the primary context
    print(f"\nGPU memory after three partitions: {(before - torch.cuda.mem_get_info()[0]) / 2**20:.0f} MiB less free")


def test_an_impossible_size_is_refused() -> None:
    from tutti_mooncake.errors import ConfigError

    with pytest.raises(ConfigError, match="in steps of"):
        SmPartition(io_sms=5)

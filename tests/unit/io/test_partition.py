"""SmPartition on a recording CUDA driver: what Python sees. The calls themselves are checked in native/tests/test_partition.cpp."""

from __future__ import annotations

import gc
import logging

import pytest

from tests.vendor_fakes import FakeCuda, build
from tutti_mooncake.errors import ConfigError
from tutti_mooncake.io.partition import SmPartition


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(build("fake_cuda", tmp_path_factory.mktemp("fake_cuda")))


@pytest.fixture
def cuda(built: FakeCuda) -> FakeCuda:
    built.reset()
    return built


def test_an_h200_is_split_into_8_and_124(cuda: FakeCuda) -> None:
    with SmPartition(library=cuda.path) as partition:
        assert (partition.kind, partition.reason) == ("green", "")
        assert (partition.io_sms, partition.compute_sms, partition.device_sms) == (8, 124, 132)
        assert partition.io_stream() and partition.compute_stream()
        assert partition.io_stream() != partition.compute_stream()
    assert partition.io_stream() is None and partition.compute_stream() is None
    assert cuda.alive == 0


def test_what_is_never_closed_is_given_back_with_the_object(cuda: FakeCuda) -> None:
    partition = SmPartition(library=cuda.path)
    assert cuda.alive > 0
    del partition
    gc.collect()
    assert cuda.alive == 0


@pytest.mark.parametrize("io_sms", [0, 7, 12, 124, 132, 2**31])
def test_an_impossible_size_is_refused_with_what_is_possible(cuda: FakeCuda, io_sms: int) -> None:
    with pytest.raises(ConfigError, match="132 SMs the I/O domain can have 8 to 120 in steps of 8"):
        SmPartition(io_sms=io_sms, library=cuda.path)
    assert cuda.alive == 0


def test_a_negative_size_and_a_missing_device_are_refused(cuda: FakeCuda) -> None:
    with pytest.raises(ConfigError, match="io_sms -8 is negative"):
        SmPartition(io_sms=-8, library=cuda.path)
    with pytest.raises(ConfigError, match="device 1 isn't there: this process sees 1"):
        SmPartition(1, library=cuda.path)


def test_an_old_driver_gives_a_priority_stream(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    cuda.device(version=12020)
    with caplog.at_level(logging.INFO), SmPartition(library=cuda.path) as partition:
        assert partition.kind == "priority" and "need CUDA 12.5" in partition.reason
        assert partition.io_stream() and partition.compute_stream() is None
        assert (partition.io_sms, partition.compute_sms) == (0, 0)
    assert "need CUDA 12.5" in caplog.text
    assert cuda.alive == 0


def test_a_failing_step_is_named_with_cudas_own_words(cuda: FakeCuda) -> None:
    cuda.fail("cuGreenCtxCreate", 2, 2)
    with SmPartition(library=cuda.path) as partition:
        assert partition.kind == "priority"
        assert partition.reason == "cuGreenCtxCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory"
    assert [call for call in cuda.calls if call.startswith("cuGreenCtxDestroy")] == ["cuGreenCtxDestroy(8)"]
    assert cuda.alive == 0


def test_without_a_driver_there_is_no_stream() -> None:
    with SmPartition(library="/nonexistent/libcuda.so.1") as partition:
        assert partition.kind == "none" and partition.reason.startswith("no NVIDIA driver: ")
        assert partition.io_stream() is None and partition.compute_stream() is None


def test_an_unclean_end_is_logged(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    partition = SmPartition(library=cuda.path)
    cuda.fail("cuStreamDestroy", 1, 2)
    partition.close()
    assert "was not closed cleanly: cuStreamDestroy failed: CUDA_ERROR_OUT_OF_MEMORY" in caplog.text

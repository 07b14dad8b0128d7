"""Parts of one GPU's SMs for I/O and for the model, as streams that PyTorch can use."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Literal, cast

from tutti_mooncake import _native
from tutti_mooncake.errors import ConfigError

logger = logging.getLogger(__name__)
DEFAULT_IO_SMS = 8  # the least that Hopper and Blackwell can set apart
CUDA_DRIVER = "libcuda.so.1"


class SmPartition:
    """Two green contexts on one GPU: `io_sms` SMs for I/O kernels, the rest for the model. A context manager.

    An I/O kernel then starts at once, provided that the model's kernels run on `compute_stream()`. Where the driver or the device can't
    do that, `kind` is "priority": one stream of the highest priority for I/O, none for compute; without a usable GPU it is "none". Both
    times `reason` says why. Give the streams to PyTorch as `torch.cuda.ExternalStream(stream, device=device)`; they live in the same
    primary context as the rest of PyTorch. One thread makes and closes it, any thread may use the streams meanwhile.
    """

    def __init__(self, device: int = 0, io_sms: int = DEFAULT_IO_SMS, *, library: str = CUDA_DRIVER) -> None:
        """`library`: the CUDA driver. Raises ConfigError, with what is possible, for a device or a number that can't be."""
        if io_sms < 0:
            raise ConfigError(f"io_sms {io_sms} is negative")
        try:
            self._native = _native.SmPartition(device, io_sms, library)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.device = device
        self.kind = cast(Literal["green", "priority", "none"], self._native.kind)
        self.reason: str = self._native.reason
        self.io_sms: int = self._native.io_sms
        self.compute_sms: int = self._native.compute_sms
        self.device_sms: int = self._native.device_sms
        if self.reason:
            logger.info("no SM partition on device %d (%s): %s", device, self.kind, self.reason)

    def io_stream(self) -> int | None:
        """CUstream of the I/O domain; None where there is none, and once closed."""
        return self._native.io_stream or None

    def compute_stream(self) -> int | None:
        """CUstream of the compute domain; None where there is none (use any stream then), and once closed."""
        return self._native.compute_stream or None

    def close(self) -> None:
        """Waits for the work on both streams, then gives them and their SMs back; may be called again.

        Nobody may use the streams afterwards: free the tensors made on them and call `torch.cuda.empty_cache()` before.
        """
        if problem := self._native.close():
            logger.warning("the SM partition of device %d was not closed cleanly: %s", self.device, problem)

    def __enter__(self) -> SmPartition:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

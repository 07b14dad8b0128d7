"""Devices, probes and executors: thin Python over the native core."""

from tutti_mooncake.io.device import DeviceFile
from tutti_mooncake.io.executor import Mover, choose_executor
from tutti_mooncake.io.probe import ProbeReport, probe

__all__ = ["DeviceFile", "Mover", "ProbeReport", "choose_executor", "probe"]

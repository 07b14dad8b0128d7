"""Exceptions and operation statuses.

TuttiError
├── ConfigError            (also ValueError)  a setting, capacity or geometry that can't work
├── TensorError            (also ValueError)  KV tensors or block ids that don't fit the geometry
├── KeyFormatError         (also ValueError)  block keys of the wrong size or type
├── StoreClosed                               an operation on a closed store
├── OperationFailed                           Result.raise_for_status()
├── PoolError
│   ├── PoolMissing                           nothing to open, and creating wasn't asked for
│   ├── PoolLocked                            another process owns the pool; names its pid
│   ├── PoolCorrupt                           no valid superblock, or devices that don't belong together
│   ├── NamespaceMismatch                     the pool holds another model, layout or dtype
│   ├── FormatVersionError                    written by a version that this one can't read
│   └── PoolReadOnly                          a change asked of a read-only store
└── DeviceError
    ├── DeviceUnavailable                     a device is missing, unreadable or not writable
    └── DeviceFull                            not enough space to allocate the pool
"""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """How one block of an operation ended; same values as `tutti::Status` in native/include/tutti/status.h."""

    OK = 0
    NOT_FOUND = 1
    REJECTED = 2
    EXISTS = 3
    RETRY = 4
    DEVICE_ERROR = 5
    SHORT_IO = 6
    NO_SPACE = 7
    CHECKSUM_ERROR = 8
    STALE = 9
    TIMEOUT = 10
    CANCELLED = 11
    BAD_STATE = 12


class TuttiError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(TuttiError, ValueError):
    """A setting, capacity or geometry that can't work."""


class TensorError(TuttiError, ValueError):
    """KV tensors or block ids that don't fit the geometry."""


class KeyFormatError(TuttiError, ValueError):
    """Block keys of the wrong size or type."""


class StoreClosed(TuttiError):
    """An operation on a closed store."""


class OperationFailed(TuttiError):
    """Some blocks of an operation failed."""


class PoolError(TuttiError):
    """Something about a pool as a whole."""


class PoolMissing(PoolError):
    """There is no pool to open."""


class PoolLocked(PoolError):
    """Another process owns the pool."""


class PoolCorrupt(PoolError):
    """No valid superblock, or devices that don't belong together."""


class NamespaceMismatch(PoolError):
    """The pool holds KV of another model, layout or dtype."""


class FormatVersionError(PoolError):
    """The pool was written by a version that this one can't read."""


class PoolReadOnly(PoolError):
    """A change was asked of a read-only store."""


class DeviceError(TuttiError):
    """Something about one device."""


class DeviceUnavailable(DeviceError):
    """A device is missing, unreadable or not writable."""


class DeviceFull(DeviceError):
    """Not enough space on a device to allocate the pool."""

"""Settings of a store, of an engine's connector and of a node in a cluster.

The same names in Python, environment (TUTTI_<NAME>) and connector options.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from dataclasses import field as dataclass_field
from typing import Any

from tutti_mooncake.errors import ConfigError

logger = logging.getLogger(__name__)
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_CHOICES = {
    "durability": ("none", "data", "flush"),
    "executor": ("auto", "uring", "posix", "uring-gpu", "gio-threads", "nvme-model"),
    "nvme_pointers": ("sgl", "prp"),
    "admission": ("all", "second_touch"),
    "load": ("auto", "layerwise", "asynchronous"),
    "load_threshold": ("measured", "none"),
    "transfer_protocol": ("tcp", "rdma"),
}
ENVIRONMENT_PREFIX = "TUTTI_"
_LONGEST_TTL_SECONDS = 10 * 366 * 86400


def parse_bytes(value: int | str, name: str) -> int:
    """Bytes of 1024, "64MiB", "200 GB". Raises ConfigError naming the setting."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(value), re.IGNORECASE)
    unit = match.group(2).upper() if match else ""
    if match is None or (unit not in _UNITS and unit + "B" not in _UNITS):
        raise ConfigError(f"{name}: {value!r} is no size; write for example 64MiB, 200GiB or 1.5TB")
    return int(float(match.group(1)) * _UNITS.get(unit, _UNITS.get(unit + "B", 1)))


def check_seconds(name: str, value: object, *, positive: bool = False) -> None:
    """Raises ConfigError unless `value` is a number of seconds, not NaN and not negative (nor zero, if `positive`)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0 or (positive and value == 0):
        raise ConfigError(f"{name} must be a {'positive ' if positive else ''}number of seconds, not {value!r}")


def check_etcd(endpoints: Sequence[str], ca: str, certificate: str, key: str, user: str, password: str) -> None:
    """Raises ConfigError for a way to etcd that can't be."""
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"etcd: {endpoint!r} is no endpoint; write host:port")
    if bool(user) != bool(password):
        raise ConfigError("etcd: user and password are given together or not at all")
    if (certificate or key) and not (ca and certificate and key):
        raise ConfigError("etcd: a client certificate needs ca, certificate and key")


@dataclass(frozen=True)
class StoreConfig:
    """Settings of one store. Sizes take numbers or text such as "200GiB". Raises ConfigError for values that can't be.

    devices                     directories or raw partitions (block devices); objects are striped over them
    pool                        name of the pool inside the directories; one pool holds one namespace
    capacity                    physical bytes of the pool over all devices and ranks, metadata included; never exceeded
    durability                  none = no waiting; data = survives the process; flush = survives power loss
    executor                    auto; for host memory uring or posix; for GPU memory uring-gpu; for tests gio-threads, nvme-model
    lanes                       I/O threads; 0 = by cores
    queue_depth                 operations in flight per lane
    pinned_bytes                most host memory that the slots of uring-gpu may pin, per GPU; its rings take a few MiB more
    io_blocks                   thread blocks of the I/O kernel, one per multiprocessor
    nvme_pointers               how NVMe commands name memory: sgl, or prp, which every drive takes
    register_buffers            pin the KV tensors for io_uring once instead of at each operation
    admission                   all = store what is offered; second_touch = only what is offered again
    write_budget_bytes_per_day  0 = no limit; beyond it stores are rejected
    ttl_seconds                 0 = never; blocks expire this long after they were stored
    tenant_salt                 blocks are found only under the salt they were stored under
    read_only                   serve what is there; change nothing
    read_deadline_seconds       a retrieve ends after this, done or not
    write_deadline_seconds      the same for a store
    prewrite                    write the whole pool once when it is made, so that later writes find allocated blocks
    rebuild_on_loss             make the pool anew on the devices that are left when one is gone
    """

    devices: tuple[str, ...]
    capacity: int | str = 0
    pool: str = "default"
    durability: str = "data"
    executor: str = "auto"
    lanes: int = 0
    queue_depth: int = 32
    pinned_bytes: int | str = "256MiB"
    io_blocks: int = 8
    nvme_pointers: str = "sgl"
    register_buffers: bool = True
    admission: str = "all"
    write_budget_bytes_per_day: int | str = 0
    ttl_seconds: float = 0
    tenant_salt: str = ""
    read_only: bool = False
    read_deadline_seconds: float = 30
    write_deadline_seconds: float = 60
    prewrite: bool = False
    rebuild_on_loss: bool = False

    def __post_init__(self) -> None:
        devices = self.devices.split(",") if isinstance(self.devices, str) else self.devices
        object.__setattr__(self, "devices", tuple(os.fspath(device) for device in devices))
        if self.devices and not all(self.devices):
            raise ConfigError(f"devices: an empty name in {list(self.devices)}")
        if not self.devices:
            raise ConfigError("devices: name at least one directory or partition, for example /mnt/nvme0/tutti")
        if len(set(map(os.path.realpath, self.devices))) != len(self.devices):
            raise ConfigError(f"devices: the same device twice in {list(self.devices)}")
        if len(self.devices) > 64:
            raise ConfigError(f"devices: at most 64, not {len(self.devices)}")
        for name in ("capacity", "write_budget_bytes_per_day", "pinned_bytes"):
            size = parse_bytes(getattr(self, name), name)
            if size < 0:
                raise ConfigError(f"{name}: {size} is negative")
            object.__setattr__(self, name, size)
        _check_choices(self)
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.pool):
            raise ConfigError(f"pool: {self.pool!r} must be 1 to 64 letters, digits, dots, dashes or underscores")
        if not 1 <= self.queue_depth <= 1024:
            raise ConfigError(f"queue_depth: {self.queue_depth} is not between 1 and 1024")
        if not 0 <= self.lanes <= 64:
            raise ConfigError(f"lanes: {self.lanes} is not between 0 and 64")
        if not 1 <= self.io_blocks <= 1024:
            raise ConfigError(f"io_blocks: {self.io_blocks} is not between 1 and 1024")
        if self.ttl_seconds > _LONGEST_TTL_SECONDS:
            raise ConfigError(f"ttl_seconds: {self.ttl_seconds} is more than ten years; 0 = never")
        check_seconds("ttl_seconds", self.ttl_seconds)
        for name in ("read_deadline_seconds", "write_deadline_seconds"):
            check_seconds(name, getattr(self, name), positive=True)

    @property
    def capacity_bytes(self) -> int:
        """`capacity` as a number."""
        return int(self.capacity)

    @property
    def write_budget(self) -> int:
        """`write_budget_bytes_per_day` as a number."""
        return int(self.write_budget_bytes_per_day)

    def as_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return {**asdict(self), "devices": list(self.devices)}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> StoreConfig:
        """Settings by name; what is missing comes from TUTTI_<NAME> in the environment, then from the defaults.

        Raises ConfigError for unknown names (with the nearest known one) and for values of the wrong type.
        """
        (merged,) = _merge((cls,), values, environment)
        return cls(**_with_devices(merged))


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine's connector. Raises ConfigError for values that can't be.

    load                        layerwise = each layer waits for its own part, in the step that computes the rest; asynchronous = the
                                request is computed once its load has ended; auto = whichever is expected to delay nobody
    load_threshold              measured = load only what is expected to be slower to compute; none = load every hit
    breaker_failures            so many failed loads (or stores) in a row, and the store is left alone for a while
    breaker_wait_seconds        how long at first; doubled up to a minute while it goes on failing
    """

    load: str = "auto"
    load_threshold: str = "measured"
    breaker_failures: int = 3
    breaker_wait_seconds: float = 1.0

    def __post_init__(self) -> None:
        _check_choices(self)
        if not 1 <= self.breaker_failures <= 1000:
            raise ConfigError(f"breaker_failures: {self.breaker_failures} is not between 1 and 1000")
        check_seconds("breaker_wait_seconds", self.breaker_wait_seconds, positive=True)

    def as_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return asdict(self)


@dataclass(frozen=True)
class ClusterConfig:
    """Settings of a node among others, which is what an engine with a store is once `etcd` is set. Raises ConfigError for values that
    can't be.

    etcd                        endpoints, host:port with commas between; empty = alone
    etcd_prefix                 of the cluster's keys
    etcd_timeout_seconds        of each call
    etcd_ca                     PEM file of the authority; turns TLS on
    etcd_certificate            PEM file of this client, with etcd_key
    etcd_key                    PEM file of this client
    etcd_user                   with etcd_password
    etcd_password               better by TUTTI_ETCD_PASSWORD: engines log their settings
    node_name                   unlike all others'; empty = made of the host's name, the pool and its first device
    node_host                   address at which others reach this node; empty = the one from which it reaches etcd
    node_port                   where it serves others; 0 = any that is free
    node_zone                   nodes of one zone are near each other
    node_ttl_seconds            so long after its last sign of life a node counts as dead
    publish_seconds             what is stored and evicted within this time is written to etcd together
    most_stale_seconds          so long other nodes are asked on after etcd was last heard of
    transfer_protocol           what moves blocks between nodes: tcp or rdma; rdma never falls back to tcp
    transfer_device             RDMA devices with commas between; empty = all
    fetch_deadline_seconds      a fetch ends after this, done or not
    """

    etcd: str = ""
    etcd_prefix: str = "tutti/v1"
    etcd_timeout_seconds: float = 3.0
    etcd_ca: str = ""
    etcd_certificate: str = ""
    etcd_key: str = ""
    etcd_user: str = ""
    etcd_password: str = dataclass_field(default="", repr=False)
    node_name: str = ""
    node_host: str = ""
    node_port: int = 0
    node_zone: str = ""
    node_ttl_seconds: float = 10.0
    publish_seconds: float = 1.0
    most_stale_seconds: float = 30.0
    transfer_protocol: str = "tcp"
    transfer_device: str = ""
    fetch_deadline_seconds: float = 10.0

    def __post_init__(self) -> None:
        _check_choices(self)
        password = self.etcd_password if self.etcd_user else ""  # which may be there for other commands
        check_etcd(self.endpoints, self.etcd_ca, self.etcd_certificate, self.etcd_key, self.etcd_user, password)
        if not 0 <= self.node_port < 65536:
            raise ConfigError(f"node_port: {self.node_port} is no port")
        if self.node_ttl_seconds < 1:
            raise ConfigError(f"node_ttl_seconds: {self.node_ttl_seconds} is less than a second")
        for name in ("etcd_timeout_seconds", "node_ttl_seconds", "publish_seconds", "most_stale_seconds", "fetch_deadline_seconds"):
            check_seconds(name, getattr(self, name), positive=True)

    @property
    def endpoints(self) -> list[str]:
        """Of etcd; none = alone."""
        return [endpoint.strip() for endpoint in self.etcd.split(",") if endpoint.strip()]

    def as_dict(self) -> dict[str, Any]:
        """All settings by name; of a password only whether there is one."""
        return {**asdict(self), "etcd_password": "(set)" if self.etcd_password else ""}


KINDS: tuple[type[Any], ...] = (StoreConfig, EngineConfig, ClusterConfig)


def read_settings(
    values: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> tuple[StoreConfig, EngineConfig, ClusterConfig]:
    """All kinds from one mapping, as `StoreConfig.from_mapping` reads one."""
    store, engine, cluster = _merge(KINDS, values, environment)
    return StoreConfig(**_with_devices(store)), EngineConfig(**engine), ClusterConfig(**cluster)


def _merge(kinds: Sequence[type[Any]], values: Mapping[str, Any], environment: Mapping[str, str] | None) -> list[dict[str, Any]]:
    """What is set, by kind of settings: `values` before the environment."""
    types = [{field.name: str(field.type) for field in fields(kind)} for kind in kinds]
    known = [name for names in types for name in names]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown setting {name!r}{hint}")
    environment = os.environ if environment is None else environment
    _warn_of_unknown(environment)
    merged = {name: environment[ENVIRONMENT_PREFIX + name.upper()] for name in known if ENVIRONMENT_PREFIX + name.upper() in environment}
    merged.update(values)
    return [{name: _typed(name, names[name], merged[name]) for name in names if name in merged} for names in types]


def _warn_of_unknown(environment: Mapping[str, str]) -> None:
    known = [field.name for kind in KINDS for field in fields(kind)]
    for name in environment:
        setting = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name.startswith(ENVIRONMENT_PREFIX) and setting not in known:
            near = difflib.get_close_matches(setting, known, n=1)
            hint = f"; did you mean {ENVIRONMENT_PREFIX}{near[0].upper()}?" if near else ""
            logger.warning("the environment has %s, which is no setting and is ignored%s", name, hint)


def _with_devices(merged: dict[str, Any]) -> dict[str, Any]:
    if "devices" not in merged:
        raise ConfigError("devices is missing: name at least one directory or partition, for example /mnt/nvme0/tutti")
    return merged


def _check_choices(settings: StoreConfig | EngineConfig | ClusterConfig) -> None:
    for field in fields(settings):
        choices = _CHOICES.get(field.name)
        if choices is not None and getattr(settings, field.name) not in choices:
            raise ConfigError(f"{field.name}: {getattr(settings, field.name)!r} is none of {', '.join(choices)}")


def _typed(name: str, kind: str, value: Any) -> Any:
    if kind == "bool" and isinstance(value, str):
        if value.lower() not in ("0", "1", "true", "false", "yes", "no"):
            raise ConfigError(f"{name}: {value!r} is neither true nor false")
        return value.lower() in ("1", "true", "yes")
    try:
        if kind == "int" and not isinstance(value, bool):
            return int(value)
        if kind == "float":
            return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: {value!r} is no number") from None
    wanted = {"bool": bool, "str": str, "int": int}.get(kind)
    if wanted is not None and not isinstance(value, wanted):
        raise ConfigError(f"{name}: {value!r} should be {kind}")
    return value

"""What `tutti doctor` looks at when the settings name an etcd: whether it answers, where others reach this node, what moves the blocks."""

from __future__ import annotations

from dataclasses import replace

from tutti_mooncake.cli.finding import Finding
from tutti_mooncake.config import ClusterConfig
from tutti_mooncake.errors import TuttiError

CLUSTER = "cluster"


def findings(config: ClusterConfig) -> list[Finding]:
    """All findings about the cluster; none when the engine is alone."""
    if not config.endpoints:
        return []
    try:
        import etcd3  # noqa: F401
    except ImportError as error:
        return [Finding(CLUSTER, "etcd", "FAIL", "no module etcd3", f"{error}: pip install 'tutti-mooncake[etcd]'")]
    return [*(endpoint(config, name) for name in config.endpoints), address(config), transfer(config)]


def endpoint(config: ClusterConfig, name: str) -> Finding:
    """Whether one endpoint answers."""
    from tutti_mooncake.agent.node import etcd_options
    from tutti_mooncake.directory.etcd_broker import EtcdBroker

    broker = EtcdBroker(etcd_options(replace(config, etcd=name)))
    try:
        _, revision = broker.head()
    except TuttiError as error:
        reason = f"{error}; engines start without it, and neither find others' blocks nor announce their own"
        return Finding(CLUSTER, f"etcd at {name}", "FAIL", "doesn't answer", reason)
    finally:
        broker.close()
    return Finding(CLUSTER, f"etcd at {name}", "ok", f"revision {revision}", "")


def address(config: ClusterConfig) -> Finding:
    """At which address others reach this node."""
    from tutti_mooncake.agent.node import node_host

    try:
        host = node_host(config)
    except TuttiError as error:
        return Finding(CLUSTER, "address", "FAIL", "unknown", str(error))
    if host.startswith("127.") or host == "::1":
        return Finding(CLUSTER, "address", "warn", host, "only this machine reaches it; set node_host if there are others")
    return Finding(CLUSTER, "address", "ok", host, "others must reach it; set node_host if it is the wrong one")


def transfer(config: ClusterConfig) -> Finding:
    """Whether the Transfer Engine starts with what was asked for."""
    from tutti_mooncake.agent.node import make_transport

    try:
        transport = make_transport(config)
    except TuttiError as error:
        return Finding(CLUSTER, "Transfer Engine", "FAIL", config.transfer_protocol, str(error))
    return Finding(CLUSTER, "Transfer Engine", "ok", f"{transport.protocol} at {transport.segment}", "")

"""Arguments that name a cluster, and what they become: its directory, read once, or followed."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    from tutti_mooncake.directory.broker import Broker
    from tutti_mooncake.directory.view import DirectoryView


def add_etcd_arguments(parser: argparse.ArgumentParser) -> None:
    """`--etcd` and how to reach it."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--etcd", default="127.0.0.1:2379", metavar="HOST:PORT", help="endpoints, with commas between (%(default)s)")
    group.add_argument("--prefix", default="tutti/v1", help="of the cluster's keys (%(default)s)")
    group.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="of each call (%(default)s)")
    group.add_argument("--ca", default="", metavar="FILE", help="PEM file of the authority; turns TLS on")
    group.add_argument("--certificate", default="", metavar="FILE", help="of this client")
    group.add_argument("--key", default="", metavar="FILE", help="of this client")
    group.add_argument("--user", default="", help="with the password in TUTTI_ETCD_PASSWORD")


def etcd_broker(arguments: argparse.Namespace) -> Broker:
    """Nothing is connected yet. Raises ConfigError."""
    try:
        from tutti_mooncake.directory.etcd_broker import EtcdBroker, EtcdOptions
    except ImportError as error:
        raise ConfigError(f"this needs the module etcd3 ({error}): pip install 'tutti-mooncake[etcd]'") from error
    password = os.environ.get("TUTTI_ETCD_PASSWORD", "") if arguments.user else ""
    endpoints = [endpoint.strip() for endpoint in arguments.etcd.split(",")]
    options = EtcdOptions(endpoints, arguments.timeout, arguments.ca, arguments.certificate, arguments.key, arguments.user, password)
    return EtcdBroker(options)


def read_directory(arguments: argparse.Namespace) -> DirectoryView:
    """All there is now. Raises BrokerError, ConfigError."""
    broker = etcd_broker(arguments)
    try:
        from tutti_mooncake.directory.records import Keys
        from tutti_mooncake.directory.view import DirectoryView

        keys = Keys(arguments.prefix)
        view = DirectoryView(keys)
        view.replace(broker.snapshot(f"{keys.prefix}/").items)
        return view
    finally:
        broker.close()

"""The directory's tests need the module etcd3 and an etcd; both come with scripts/setup."""

import pytest

from tests.etcd_server import etcd_binary

pytest.importorskip("etcd3", reason="the module etcd3 is not installed (scripts/setup)")
if not etcd_binary():
    pytest.skip("there is no etcd (scripts/setup)", allow_module_level=True)

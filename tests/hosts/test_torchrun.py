"""torchrun's rendezvous of ours: it listens on one address alone, where torchrun's own listens on all."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from drumline.channel.launch import torchrun
from drumline.core.errors import RunError
from hosts.namespaces import listening, needs_two_hosts
from refused import refused

pytestmark = pytest.mark.torch


def made(endpoint: str, **config: Any) -> Any:
    params = RendezvousParameters(torchrun.NAME, endpoint, "run", 1, 1, last_call_timeout=1, **config)
    return torchrun.handler()(params)


@pytest.mark.parametrize("endpoint", ["localhost:0", "[::1]:0"])
def test_both_ports_are_open_at_the_endpoints_address_alone(endpoint: str) -> None:
    needs_two_hosts()
    found = made(endpoint)
    try:
        told = found.next_rendezvous()
        ports = {found._store.port, found._shared_tcp_store_server.port}
        addresses = {address for address, port in listening() if port in ports}
        assert (len(ports), addresses) == (2, {"::1" if "::1" in endpoint else "127.0.0.1"})
        assert told.bootstrap_store_info.master_port in ports
        assert found.get_backend() == "drumline"
    finally:
        found.shutdown()


def test_an_endpoint_that_leads_nowhere_is_named() -> None:
    with refused(RunError, r"--rdzv-endpoint: no address for no-such-host\.invalid within 1 s"):
        made("no-such-host.invalid:29500", read_timeout=1)
    with refused(RunError, "interface is 'wire7'", expected=r"lo \(127\.0\.0\.1"):
        made("localhost:0", interface="wire7")


def test_torchrun_finds_it_by_the_packages_entry_point() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    module, _, name = tomllib.loads(text)["project"]["entry-points"]["torchrun.handlers"][torchrun.NAME].partition(":")
    assert getattr(import_module(module), name) is torchrun.handler

"""Ports are told apart, taken only where they are free, and never given twice."""

from __future__ import annotations

import pytest

from triton_repo import ports
from triton_repo.errors import ServerError


def test_two_services_cannot_be_given_one_port() -> None:
    with pytest.raises(ServerError, match="http and metrics cannot share port 8000; give another: --metrics-port"):
        ports.choose_ports({"grpc": 8001, "http": 8000, "metrics": 8000})


def test_a_free_port_is_never_a_wanted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_FREE_PORTS", range(20000, 20003))
    monkeypatch.setattr(ports, "port_is_free", lambda port: True)
    for _ in range(20):
        chosen = ports.choose_ports({"grpc": 0, "http": 20001, "metrics": 0})
        assert chosen["http"] == 20001
        assert {chosen["grpc"], chosen["metrics"]} == {20000, 20002}

"""What `h3trt gateway` takes is what its settings and its page say."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from h3trt.amounts import bytes_of
from h3trt.exits import CommandError
from h3trt.gateway_commands import gateway
from h3trt.serving import cache_bytes


def test_the_command_has_the_defaults_of_the_settings() -> None:
    chosen = {name: parameter.default for name, parameter in inspect.signature(gateway).parameters.items()}
    settings = GatewaySettings("", Path())
    assert (chosen["host"], chosen["port"]) == (settings.host, settings.port)
    assert (chosen["queue"], chosen["concurrency"]) == (settings.queue, settings.concurrency)
    assert (chosen["sync_timeout"], chosen["drain_timeout"]) == (settings.sync_seconds, settings.drain_seconds)
    assert chosen["keep_days"] * 86400 == settings.keep_seconds
    assert bytes_of("--keep", chosen["keep"]) == settings.keep_bytes


@pytest.mark.parametrize(("text", "size"), [("1MiB", 1 << 20), ("256 MiB", 256 << 20), ("2GiB", 2 << 30)])
def test_an_amount_is_bytes(text: str, size: int) -> None:
    assert bytes_of("--keep", text) == cache_bytes(text) == size


@pytest.mark.parametrize("text", ["", "1", "1GB", "-1GiB", "1.5GiB", "off", "1000000000GiB"])
def test_another_amount_is_refused_by_its_option(text: str) -> None:
    with pytest.raises(CommandError, match=r"--keep .*must be an amount such as"):
        bytes_of("--keep", text)


def test_a_cache_may_be_off() -> None:
    assert cache_bytes("off") == 0
    with pytest.raises(CommandError, match="--condition-cache 'of': must be off or an amount"):
        cache_bytes("of")

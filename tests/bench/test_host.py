"""Memory in use is counted against what a profile calls a device's memory."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import torch

from bench import host
from engines.profile import Profile

IDENTITY = "7b0c6a4e-0000-4000-8000-000000000000"


def test_what_the_driver_keeps_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Profile.load("h200").device
    assert device is not None
    reserved, context, free = 616 << 20, 700 << 20, 1 << 34
    cuda_total = device.memory_bytes - reserved
    asked = []

    def answer(command: tuple[str, ...], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout=f"{device.memory_mib}\n")

    monkeypatch.setattr(subprocess, "run", answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid=IDENTITY))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, cuda_total))
    assert host.used_memory() == device.memory_bytes - free
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (cuda_total - context, cuda_total))
    assert host.used_memory() == reserved + context
    assert asked[0][-1] == f"--id=GPU-{IDENTITY}"

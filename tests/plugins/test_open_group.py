"""How exchanges are chosen where there are no GPUs; on two of them, see tests/gpu/test_exchange_cuda.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plugins.kernels import symmetric_exchange
from plugins.kernels.open_group import asked_for, open_group
from plugins.kernels.symmetric_exchange import ExchangeError
from plugins.ranks import ProcessGroup

CPU = torch.device("cpu")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collectives_are_used_and_the_reason_is_logged(
    alone: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(open_group(alone, CPU), ProcessGroup)
    assert "collectives of gloo (device cpu has no symmetric memory)" in caplog.text
    assert isinstance(open_group(alone, CPU, "collective"), ProcessGroup)
    assert "collectives of gloo (asked for)" in caplog.text


def test_stores_that_cannot_be_are_not_replaced_in_silence(alone: dist.ProcessGroup) -> None:
    with pytest.raises(ExchangeError, match="device cpu has no symmetric memory; choose transport auto or collective"):
        open_group(alone, CPU, "symmetric")


def test_an_operator_may_choose() -> None:
    assert asked_for({}) == asked_for({"H3TRT_EXCHANGE": ""}) == "auto"
    assert asked_for({"H3TRT_EXCHANGE": "collective"}) == "collective"
    with pytest.raises(ValueError, match="H3TRT_EXCHANGE: got 'nccl'; must be one of auto, symmetric, collective"):
        asked_for({"H3TRT_EXCHANGE": "nccl"})


def test_a_result_that_somebody_holds_is_told_from_one_that_nobody_does() -> None:
    memory = torch.empty(64, dtype=torch.uint8)
    assert symmetric_exchange._holders(memory) == symmetric_exchange._FREE
    result = memory[:32].view(torch.float32).view(2, 4)
    assert symmetric_exchange._holders(memory) > symmetric_exchange._FREE
    del result
    assert symmetric_exchange._holders(memory) == symmetric_exchange._FREE

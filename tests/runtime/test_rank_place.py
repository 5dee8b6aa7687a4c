"""What a rank's environment says of NCCL before it starts."""

from __future__ import annotations

import pytest

from runtime.rank_place import see_one_gpu


@pytest.mark.parametrize(("said", "left"), [({}, "0"), ({"NCCL_NVLS_ENABLE": "1"}, "1")])
def test_ranks_use_nvlink_multicast_only_where_an_operator_says_so(said: dict[str, str], left: str) -> None:
    environment = dict(said)
    see_one_gpu(0, environment)
    assert environment["NCCL_NVLS_ENABLE"] == left

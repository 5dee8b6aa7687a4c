"""What a rank's environment says of the GPUs before CUDA starts."""

from __future__ import annotations

import pytest

from runtime.rank_place import see_one_gpu


@pytest.mark.parametrize(
    ("visible", "local", "left"), [(None, 3, "3"), ("", 1, "1"), ("4,6", 1, "6"), ("GPU-a,GPU-b", 0, "GPU-a")]
)
def test_a_rank_sees_the_gpu_of_its_number_alone(visible: str | None, local: int, left: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    see_one_gpu(local, environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == left


def test_a_rank_for_which_there_is_no_gpu_sees_none() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4,6"}
    see_one_gpu(2, environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(("said", "left"), [({}, "0"), ({"NCCL_NVLS_ENABLE": "1"}, "1")])
def test_ranks_use_nvlink_multicast_only_where_an_operator_says_so(said: dict[str, str], left: str) -> None:
    environment = dict(said)
    see_one_gpu(0, environment)
    assert environment["NCCL_NVLS_ENABLE"] == left

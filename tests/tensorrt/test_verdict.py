"""A plan is what its model asked for only if every expected node is found, in every optimisation profile."""

from __future__ import annotations

import pytest

from engines.backends.tensorrt.request import CensusError, Expected
from engines.backends.tensorrt.verdict import SHOWN, check
from engines.layers import Layer, LayerTensor

WANTED = Expected(
    attention_nodes=("attend",),
    matmul_nodes={"product": "FP8"},
    collective_nodes=("swap",),
    plugins=("window", "window"),
)


def layer(name: str, kind: str, origin: str, *dtypes: str) -> Layer:
    tensors = tuple(LayerTensor(name="t", dtype=dtype, shape=(1,)) for dtype in dtypes)
    return Layer(name=name, kind=kind, inputs=tensors, outputs=(), origins=(origin,))


ONE_PROFILE = (
    layer("_gemm_mha_v2_myl0_1", "kgen", "attend", "BFloat16", "BFloat16"),
    layer("__myl_Cast_myl0_2", "kgen", "product", "Float"),
    layer("product_myl0_3", "gemm", "product", "FP8", "FP8"),
    layer("swap_myl0_4", "comm_alltoall", "swap", "Float"),
    layer("window_1", "PluginV3", "first", "Half"),
    layer("window_2", "PluginV3", "second", "Half"),
)


def test_a_plan_with_everything_passes() -> None:
    check("g", ONE_PROFILE, WANTED, profiles=1)
    check("g", ONE_PROFILE * 3, WANTED, profiles=3)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (0, "attention attend: expected one fused kernel in each of 2 profiles, found _gemm_mha_v2_myl0_1"),
        (2, "matrix product product: expected FP8 in each of 2 profiles, found"),
        (3, "collective swap: expected one in each of 2 profiles, found swap_myl0_4"),
        (4, "plugin window: expected 4 layers, found window_1"),
    ],
)
def test_what_one_profile_lacks_is_told(lost: int, said: str) -> None:
    second = ONE_PROFILE[:lost] + ONE_PROFILE[lost + 1 :]
    with pytest.raises(CensusError) as failed:
        check("g", ONE_PROFILE + second, WANTED, profiles=2)
    assert str(failed.value).startswith("graph g: not the plan that was asked for\n")
    assert said in str(failed.value)


def test_a_collective_too_many_is_told() -> None:
    more = layer("swap_again", "comm_alltoall", "swap_again", "Float")
    with pytest.raises(CensusError, match=r"collectives: expected 1, found swap_myl0_4.*; swap_again"):
        check("g", (*ONE_PROFILE, more), WANTED, profiles=1)


def test_a_plugin_is_not_taken_for_one_whose_name_begins_with_its() -> None:
    wanted = WANTED.model_copy(update={"plugins": ("exchange", "exchange_back")})
    plugins = (layer(f"node_{name}", "PluginV3", name, "Half") for name in ("exchange_1", "exchange_back"))
    check("g", (*ONE_PROFILE[:4], *plugins), wanted, profiles=1)


def test_a_product_of_which_a_part_runs_in_another_type_is_not_taken() -> None:
    part = layer("product_part_myl0_9", "gemm", "product", "BFloat16", "BFloat16")
    with pytest.raises(CensusError, match=r"product: expected FP8, found .*product_part_myl0_9 \(gemm.BFloat16"):
        check("g", (*ONE_PROFILE, part), WANTED, profiles=1)


def test_many_complaints_are_counted() -> None:
    products = {f"product_{i}": "FP8" for i in range(SHOWN + 5)}
    wanted = WANTED.model_copy(update={"matmul_nodes": products})
    with pytest.raises(CensusError, match="and 5 more"):
        check("g", ONE_PROFILE, wanted, profiles=1)

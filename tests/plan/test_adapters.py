"""What is planned for adapters is what their files hold, and profiles that merge them have the memory for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.adapters import AdapterMode
from engines.plan import PlanError, Workload, make_plan, released_outline
from engines.plan.planner import draft
from engines.plan.weights import Model
from engines.profile import PROFILES, Adapters, Profile
from engines.switchable import switchables
from export.artifacts.artifact import Artifact
from export.artifacts.base import RELEASED
from export.artifacts.read import read_artifact
from export.binding import bind
from export.checkpoint import Checkpoint
from export.miniature import write_sparse_released
from export.miniature.artifacts import FOLDERS, write_artifacts

MERGING = {"b300": 3, "b300x4": 3, "h200_inductor_fp8": 2, "h200_inductor_fp8_sage": 2}
"""Shipped profiles that merge adapters, and how many of them fit beside a clip of 10 s."""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Artifact]:
    """The release's sizes and one of Turbo's adapters, in sparse files."""
    root = tmp_path_factory.mktemp("released")
    write_sparse_released(root / "checkpoint", "native")
    write_artifacts(root / "artifacts", RELEASED.config, seed=None)
    artifact = read_artifact(root / "artifacts" / FOLDERS["turbo_8step"])
    assert isinstance(artifact, Artifact)
    return Checkpoint.open(root / "checkpoint"), artifact


@pytest.mark.parametrize("mode", ["low_rank", "merged"])
@pytest.mark.parametrize("profile", ["h200", "h200_inductor_fp8"])
def test_bytes_are_those_that_an_adapter_is_bound_to(
    released: tuple[Checkpoint, Artifact], tmp_path: Path, profile: str, mode: AdapterMode
) -> None:
    checkpoint, artifact = released
    loaded = Profile.load(profile).model_copy(update={"adapters": Adapters(mode=mode), "quality": {}})
    (one,) = switchables(checkpoint, loaded, [artifact], tmp_path)
    instances = [instance for graph in one.graphs for instance in bind(graph).instances]
    own = {s.key: s.nbytes for i in instances for s in i.values() if mode == "merged" or s.file == one.file.path}
    found = draft(loaded, Model(released_outline()), Workload(adapters=1)).adapter
    assert found == sum(own.values())
    if mode == "low_rank":
        # spec/model.md 2.3: 52 blocks of rank 128, each linear's inputs and outputs, two bytes.
        sides = 3 * (5376 + 7168) + (7168 + 5376) + (5376 + 28672) + (14336 + 5376)
        assert found == 52 * 128 * 2 * sides == one.file.size - len(one.file.header)


@pytest.mark.parametrize("name", MERGING)
def test_a_profile_that_merges_says_how_many_fit_and_what_fits_more(name: str) -> None:
    profile, most = Profile.load(name), MERGING[name]
    assert profile.adapters.mode == "merged"
    none = make_plan(profile, released_outline(), Workload())
    full = make_plan(profile, released_outline(), Workload(adapters=most))
    assert full.peak - none.peak == most * full.adapter
    assert full.disk - none.disk == most * full.adapter
    with pytest.raises(PlanError, match=r'would fit: adapters\.mode = "low_rank"'):
        make_plan(profile, released_outline(), Workload(adapters=most + 1))


def test_no_other_shipped_profile_merges() -> None:
    shipped = [Profile.load(file.stem) for file in PROFILES.glob("*.toml")]
    assert {profile.name for profile in shipped if profile.adapters.mode == "merged"} == MERGING.keys()


def test_low_rank_sides_cost_their_bytes_and_one_product_more(released: tuple[Checkpoint, Artifact]) -> None:
    profile = Profile.load("h200x8")
    none, one, two = (make_plan(profile, released_outline(), Workload(adapters=n)) for n in range(3))
    assert two.peak - one.peak == one.adapter
    product = one.graph("block.low_rank").activations - one.graph("block").activations
    assert one.peak - none.peak == one.adapter + product
    # A rank's rows of the feed-forward's first product, and of the 128 channels before it, in bfloat16.
    assert product == pytest.approx(one.rows.local * 2 * (28672 + 128), abs=1)


def test_streamed_blocks_take_their_sides_with_them() -> None:
    profile = Profile.load("rtx4090")
    none, one = (make_plan(profile, released_outline(), Workload(seconds=4, adapters=n)) for n in range(2))
    assert profile.residency is not None
    assert isinstance(profile.residency.denoiser, int)
    layers, block = 50, 2 * 128 * (3 * 12544 + 12544 + 34048 + 19712)
    streamed = (layers - profile.residency.denoiser) * block
    moved = one.stage("denoise").transferred - none.stage("denoise").transferred
    assert moved == one.workload.forwards * streamed
    # Where nothing of the text encoder stays, its refiner's sides come with it.
    assert one.pinned - none.pinned == streamed + 2 * block

"""Adapters of a store: blocks run with the weights of the one that is chosen, and the base's as if there were none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engines import build as building
from engines import switchable
from engines.build import BuildError, BuildReport, build
from engines.profile import Adapters, Partition, Profile, Residency
from engines.sessions.backend import Opening
from engines.sessions.engine_set import EngineInputError, EngineSet
from engines.sessions.inductor import PlacedTensors
from engines.sessions.weights import MappedWeights
from engines.store import EngineStore, StoreError
from engines.switchable import SwitchableError, switchables
from export.artifacts.artifact import Artifact
from export.artifacts.read import open_artifact
from export.binding import bind
from export.checkpoint import Checkpoint, materialise
from export.checkpoint.components.denoiser import DenoiserConfig
from export.graphs import block, context
from export.graphs.graph import Graph
from export.miniature import write_miniature
from export.miniature.artifacts import FOLDERS, write_artifacts
from export.trace import BoundModule
from h3trt.cli import app
from tests.engines.conftest import use_graphs
from tests.engines.fake_tensorrt import HostGpu
from tests.engines.workshop import write_profile

ROWS = 70
TURBO = ("turbo_4step", "turbo_8step", "turbo_ref2v")
MODES = ("low_rank", "merged")


def names(artifacts: list[Artifact]) -> list[str]:
    return [artifact.distilled.name for artifact in artifacts]


def graphs(checkpoint: Checkpoint, profile: Profile, partition: Partition, weights: Path = Path()) -> tuple[Graph, ...]:
    """What adapters change, and no more."""
    makers = (context.graphs, block.segments if profile.row_chunk else block.graphs)
    return tuple(graph for make in makers for graph in make(checkpoint, partition, torch.float32))


@dataclass(frozen=True)
class Offer:
    """A miniature, Turbo's adapters for it, and stores that offer them."""

    root: Path
    artifacts: list[Artifact]

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint.open(self.root / "checkpoint")

    def profile(self, mode: str, **changes: str) -> Path:
        file = self.root / f"{mode}{len(changes)}.toml"
        write_profile(file, partitions='["fl2va", "ref2va"]', **changes)
        file.write_text(file.read_text() + f'\n[adapters]\nmode = "{mode}"\n')
        return file

    def build(self, mode: str, artifacts: list[Artifact], store: Path) -> BuildReport:
        return build(self.root / "checkpoint", self.profile(mode), store, adapters=artifacts)


@pytest.fixture(scope="module")
def patched() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_graphs(patch, graphs)
        patch.setattr(building, "check_consumption", lambda checkpoint, graphs, partition: None)
        patch.setattr(switchable, "profile_graphs", graphs)
        patch.setattr(switchable, "declared_graphs", graphs)
        yield


@pytest.fixture(scope="module")
def offer(patched: None, tmp_path_factory: pytest.TempPathFactory) -> Offer:
    root = tmp_path_factory.mktemp("adapters")
    write_miniature(root / "checkpoint", "native", seed=5)
    checkpoint = Checkpoint.open(root / "checkpoint")
    write_artifacts(root / "artifacts", DenoiserConfig.model_validate(checkpoint.config("denoiser")), seed=2)
    found = [open_artifact(root / "artifacts" / FOLDERS[name], checkpoint) for name in TURBO]
    return Offer(root, [artifact for artifact in found if isinstance(artifact, Artifact)])


@pytest.fixture(scope="module")
def stores(offer: Offer) -> dict[str, Path]:
    """A store for each mode, and one without adapters."""
    made = {mode: offer.build(mode, offer.artifacts, offer.root / mode).store for mode in MODES}
    return made | {"none": offer.build("low_rank", [], offer.root / "none").store}


@pytest.fixture(scope="module")
def engines(stores: dict[str, Path]) -> dict[str, EngineSet]:
    return {name: EngineSet.open(store) for name, store in stores.items()}


def inputs(engines: EngineSet, graph: str) -> dict[str, torch.Tensor]:
    """Some rows, which depend on nothing but their shapes."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for spec in engines.manifest.graphs[graph].inputs:
        shape = [ROWS if isinstance(size, str) else size for size in spec.shape]
        whole = spec.dtype == "int64"
        made[spec.name] = (
            torch.randint(12, shape, generator=generator) if whole else torch.rand(shape, generator=generator) - 0.5
        )
    return made


def run(
    engines: EngineSet, graph: str, partition: Partition, instance: int, adapter: str | None = None
) -> torch.Tensor:
    (found,) = engines.run(graph, inputs(engines, graph), instance, partition, adapter=adapter).values()
    return found


def expected(offer: Offer, engines: EngineSet, graph: str, partition: Partition, instance: int, name: str,
             rounded: bool) -> torch.Tensor:  # fmt: skip
    """Eager torch over W + alpha / rank B A, formed from the files of diffusers' names, whatever the packing."""
    (artifact,) = (each for each in offer.artifacts if each.distilled.name == name)
    (base,) = (each for each in graphs(offer.checkpoint, _profile(), partition) if each.name == graph)
    binding = bind(base)
    values = {n: materialise(s).float() for n, s in binding.instances[instance].items()}
    heads = offer.checkpoint.dimensions.denoiser.heads
    for key, stored in binding.instances[instance].items():
        change = _change(artifact, stored.key, heads)
        if change is not None:
            values[key] += change
            values[key] = values[key].bfloat16().float() if rounded else values[key]
    ordered = tuple(values[spec.name] for spec in binding.inputs)
    with torch.no_grad():
        found = BoundModule(base, binding, instance)(tuple(inputs(engines, graph).values()), ordered)
    assert isinstance(found, torch.Tensor)
    return found


def _profile() -> Profile:
    return Profile.load("cpu")


def _change(artifact: Artifact, key: str, heads: int) -> torch.Tensor | None:
    """What is added to a native tensor (spec/model.md 1c)."""
    prefix, _, rest = key.replace("token_refiner.blocks.", "token_refiner.refiner_blocks.").rpartition(".attn.")
    if not prefix:
        prefix, _, rest = key.replace("token_refiner.blocks.", "token_refiner.refiner_blocks.").rpartition(".mlp.")
    ours = prefix if prefix.startswith("token_refiner") else f"transformer_{prefix}"
    plain = {"out_proj.weight": "attn.to_out.0", "fc2.weight": "ff.net.2"}
    if rest in plain:
        return _delta(artifact, f"{ours}.{plain[rest]}")
    if rest == "fc1.weight":
        up, gate = _delta(artifact, f"{ours}.ff.net.0.proj").chunk(2)
        return torch.cat([gate, up])
    if rest == "qkv_proj.weight":
        parts = [_delta(artifact, f"{ours}.attn.to_{x}").unflatten(0, (heads, -1)) for x in "qkv"]
        return torch.stack(parts, dim=1).flatten(0, 2)
    return None


def _delta(artifact: Artifact, name: str) -> torch.Tensor:
    side = artifact.patches[f"{name}.weight"].low_rank
    assert side is not None
    alpha = float(artifact.metadata["alpha"])
    return alpha / side.down.shape[0] * (materialise(side.up).float() @ materialise(side.down).float())


PLACES: list[tuple[str, Partition, int, int]] = [
    ("block", "fl2va", 0, 0),
    ("block", "fl2va", 1, 1),
    ("block", "ref2va", 1, 2),
    ("context", "fl2va", 0, 1),
    ("context", "ref2va", 0, 2),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("graph", "partition", "instance", "which"), PLACES)
def test_an_adapter_computes_what_its_formula_says(
    offer: Offer, engines: dict[str, EngineSet], mode: str, graph: str, partition: Partition, instance: int, which: int
) -> None:
    name = names(offer.artifacts)[which]
    found = run(engines[mode], graph, partition, instance, name)
    wanted = expected(offer, engines[mode], graph, partition, instance, name, rounded=mode == "merged")
    # float32 sums in another order; merged, some weights are rounded to the other side of a middle.
    assert (found - wanted).norm() < (1e-5 if mode == "low_rank" else 1e-4) * wanted.norm()
    assert (run(engines[mode], graph, partition, instance) - wanted).norm() > 1e-2 * wanted.norm()


@pytest.mark.parametrize("mode", MODES)
def test_a_then_b_then_a_then_none_are_the_bytes_of_each_alone(
    offer: Offer, engines: dict[str, EngineSet], mode: str
) -> None:
    first, second, _ = names(offer.artifacts)
    alone = run(engines["none"], "block", "fl2va", 0)
    order = (None, first, second, first, None, second)
    found = [run(engines[mode], "block", "fl2va", 0, name) for name in order]
    assert torch.equal(found[0], alone)
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[0], found[4])
    assert torch.equal(found[2], found[5])
    assert not torch.equal(found[1], found[2])


def test_the_base_is_bound_to_the_checkpoint_s_bytes_in_every_mode(stores: dict[str, Path]) -> None:
    alone = EngineStore.open(stores["none"]).manifest
    for mode in MODES:
        manifest = EngineStore.open(stores[mode]).manifest
        for partition in ("fl2va", "ref2va"):
            files = {r.file for g in manifest.bindings[partition].values() for i in g for r in i.values()}
            assert all(Path(manifest.weight_files[i].path).is_relative_to(manifest.checkpoint.root) for i in files)
        assert manifest.graphs["block"].file == alone.graphs["block"].file


def test_adapters_of_a_mode_share_the_engines_that_they_need(offer: Offer, stores: dict[str, Path]) -> None:
    low_rank, merged = (EngineStore.open(stores[mode]).manifest for mode in MODES)
    assert low_rank.graphs.keys() == {"context", "block", "context.low_rank", "block.low_rank"}
    assert merged.graphs.keys() == {"context", "block"}
    turbo4, turbo8, ref2v = names(offer.artifacts)
    assert low_rank.bindings.keys() == {"fl2va", "ref2va", f"fl2va+{turbo4}", f"fl2va+{turbo8}", f"ref2va+{ref2v}"}
    assert low_rank.bindings[f"fl2va+{turbo4}"]["block"][1].keys() == {
        f"{name}.{half}"
        for name in ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
        for half in ("down", "up")
    }
    assert merged.bindings[f"ref2va+{ref2v}"]["block"][0].keys() == merged.bindings["ref2va"]["block"][0].keys()
    assert low_rank.adapters[turbo8].distilled.schedule.forwards == 8


def test_inspecting_a_store_tells_what_requests_may_choose(offer: Offer, stores: dict[str, Path]) -> None:
    found = CliRunner().invoke(app, ["inspect", str(stores["low_rank"])], env={"COLUMNS": "400"})
    assert found.exit_code == 0, found.output
    turbo4, turbo8, ref2v = names(offer.artifacts)
    told = [line.partition(";")[0] for line in found.output.splitlines() if line.startswith("adapter ")]
    assert told == [
        f"adapter {turbo4}: t2va, fl2va in 4 forwards, shifts 6 and 3",
        f"adapter {turbo8}: t2va, fl2va in 8 forwards, shifts 12 and 3",
        f"adapter {ref2v}: ref2va in 4 forwards, shifts 12 and 3",
    ]
    assert f"; low_rank, {offer.artifacts[0].path}" in found.output


def test_a_second_build_does_nothing_and_another_adapter_only_what_is_its_own(
    offer: Offer, stores: dict[str, Path], tmp_path: Path
) -> None:
    assert offer.build("low_rank", offer.artifacts, stores["low_rank"]).built == ()
    store = shutil.copytree(stores["low_rank"], tmp_path / "store")
    kept = [offer.artifacts[0], offer.artifacts[2]]
    built = set(offer.build("low_rank", kept, store).built)
    # Places in the list of files move, and with them what names them; no engine is made anew.
    assert not any(name.endswith((".emit", ".lower", ".check")) for name in built)
    assert names(kept) == list(EngineStore.open(store).manifest.adapters)
    assert not list((store / "weights").glob(f"*{offer.artifacts[1].distilled.name}.*"))


def test_what_an_adapter_binds_requests_to_is_told_anew_when_it_alone_has_changed(
    offer: Offer, stores: dict[str, Path], tmp_path: Path
) -> None:
    store = shutil.copytree(stores["low_rank"], tmp_path / "store")
    first, *others = offer.artifacts
    schedule = first.distilled.schedule.model_copy(update={"video_shift": 7.0})
    changed = replace(first, distilled=first.distilled.model_copy(update={"schedule": schedule}))
    assert offer.build("low_rank", [changed, *others], store).built == ("manifest",)
    assert EngineStore.open(store).manifest.adapters[first.distilled.name].distilled.schedule == schedule


def test_unknown_adapters_and_those_of_another_partition_are_refused(
    offer: Offer, engines: dict[str, EngineSet]
) -> None:
    turbo4, turbo8, ref2v = names(offer.artifacts)
    with pytest.raises(EngineInputError, match=rf"adapter '{ref2v}': must be one of fl2va's: {turbo4}, {turbo8}"):
        run(engines["low_rank"], "block", "fl2va", 0, ref2v)
    with pytest.raises(EngineInputError, match="adapter 'x': must be one of fl2va's: none"):
        run(engines["none"], "block", "fl2va", 0, "x")


def test_a_store_says_with_which_command_it_is_built_again(
    offer: Offer, stores: dict[str, Path], tmp_path: Path
) -> None:
    store = shutil.copytree(stores["low_rank"], tmp_path / "store")
    manifest = json.loads((store / "manifest.json").read_text())
    (name, *_) = names(offer.artifacts)
    del manifest["bindings"][f"fl2va+{name}"]["block"][0]["attn.to_q.up"]
    (store / "manifest.json").write_text(json.dumps(manifest))
    path = offer.artifacts[0].path
    with pytest.raises(StoreError, match=rf"bindings\.fl2va\+{name}\.block\.0: attn\.to_q\.up: .*--adapter {path}"):
        EngineStore.open(store)


def test_a_build_is_resumed_with_the_adapters_that_it_was_begun_with(
    offer: Offer, stores: dict[str, Path], tmp_path: Path
) -> None:
    def resume(store: Path, artifacts: list[Artifact]) -> BuildReport:
        return build(offer.root / "checkpoint", offer.profile("low_rank"), store, resume=True, adapters=artifacts)

    with pytest.raises(BuildError, match=r"was begun with other adapters \(.*turbo.*\) than none; leave out --resume"):
        resume(stores["low_rank"], [])
    first, *others = offer.artifacts
    changed = replace(first, distilled=first.distilled.model_copy(update={"sha256": "0" * 64}))
    with pytest.raises(BuildError, match=rf"\({first.path} of SHA-256 \w+, .*than {first.path} of SHA-256 0000"):
        resume(stores["low_rank"], [changed, *others])
    store = shutil.copytree(stores["low_rank"], tmp_path / "store")
    moved = replace(first, path=tmp_path / first.path.name)
    assert resume(store, [moved, *others]).built == ("manifest",)
    assert EngineStore.open(store).manifest.adapters[first.distilled.name].path == str(moved.path)


def test_an_adapter_that_changes_adaln_is_not_run_with_the_base_s_tables(
    offer: Offer, stores: dict[str, Path], tmp_path: Path
) -> None:
    store = shutil.copytree(stores["low_rank"], tmp_path / "store")
    manifest = json.loads((store / "manifest.json").read_text())
    (name, *_) = names(offer.artifacts)
    assert not manifest["adapters"][name]["modulates"]
    manifest["adapters"][name]["modulates"] = True
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=rf"tables\.fl2va\+{name}: is missing; {name} pins its schedule"):
        EngineStore.open(store)


@pytest.mark.parametrize("denoiser", ["resident", "swapped", 0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_on_a_device_an_adapter_s_weights_are_beside_the_one_copy_of_the_base_s(
    offer: Offer, stores: dict[str, Path], mode: str, denoiser: str | int
) -> None:
    store, gpu = _placed(stores[mode], denoiser), HostGpu()
    first, second, _ = names(offer.artifacts)
    graphs = tuple(store.manifest.graphs)
    placed = PlacedTensors(Opening(store, graphs, ("fl2va", "ref2va")), gpu)
    with gpu.computing():
        placed.load_lasting()
    mapped = MappedWeights(store.manifest.weight_files)
    places: dict[str | None, list[int]] = {}
    for adapter in (None, first, second, first, None):
        graph = store.manifest.engine_of("block", adapter)
        specs = {spec.name: spec for spec in store.manifest.graphs[graph].weights}
        for instance in (0, 1):
            regions = store.manifest.regions(graph, instance, "fl2va", adapter)
            with gpu.computing(), placed.tensors(graph, instance, "fl2va", adapter) as weights:
                assert weights.keys() == specs.keys() == regions.keys()
                for name, weight in weights.items():
                    raw = torch.from_numpy(mapped.array(regions[name], specs[name].dtype).copy())
                    assert torch.equal(weight.view(torch.int16), raw.view(torch.int16)), (adapter, name)
                places.setdefault(adapter, []).append(weights["attn.qkv_proj.weight"].data_ptr())
    if denoiser == "resident":
        # The base's own bytes, wherever low-rank sides are beside them; merged, an adapter's.
        shared = places[first][:2] == places[None][:2]
        assert shared == (mode == "low_rank")
        assert places[first][:2] == places[first][2:]
        assert places[None][:2] == places[None][2:]


def _placed(store: Path, denoiser: str | int) -> EngineStore:
    """The store as if it were for a GPU that keeps the denoiser in some place."""
    opened = EngineStore.open(store)
    places = dict.fromkeys(("text_encoder", "video_encoder", "audio_encoder", "modulation"), "resident")
    places |= dict.fromkeys(("video_decoder", "audio_decoder"), "resident")
    residency = Residency.model_validate({**places, "denoiser": denoiser})
    profile = opened.manifest.profile.model_copy(update={"residency": residency})
    return EngineStore(opened.root, opened.manifest.model_copy(update={"profile": profile}))


def test_what_a_store_cannot_offer_is_refused_before_anything_is_built(offer: Offer, tmp_path: Path) -> None:
    cpu = Profile.load(offer.profile("low_rank"))
    first, *_, ref2v = offer.artifacts

    def refused(profile: Profile, artifacts: list[Artifact]) -> str:
        with pytest.raises(SwitchableError) as error:
            switchables(offer.checkpoint, profile, artifacts, tmp_path)
        return str(error.value)

    assert f"is called '{first.distilled.name}' like {first.path}; leave out one" in refused(cpu, [first, first])
    alone = cpu.model_copy(update={"partitions": ("fl2va",)})
    assert "is for partition 'ref2va', which profile" in refused(alone, [ref2v])
    assert "must be 'bound'" in refused(cpu.model_copy(update={"weights": "baked"}), [first])
    student = open_artifact(offer.root / "artifacts" / FOLDERS["fasth3_v1_dense"], offer.checkpoint)
    assert isinstance(student, Artifact)
    assert "is a model of its own, which h3trt adapters fuse makes" in refused(cpu, [student])


def test_the_mode_of_a_profile_is_one_of_two() -> None:
    assert Profile.load("cpu").adapters == Adapters(mode="low_rank")

"""The engine store: a directory of engine files with a manifest that says what they are and what they were made from.

A serving host imports this module: it needs neither the exporter nor the checkpoint's readers. Weights are not in the
store; the manifest says where in the checkpoint's files each one lies.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from engines import machine
from engines.adapters import AdapterMode, has_sides, low_rank_name, weights_key, without_sides
from engines.backend import BackendMissing, backend_version
from engines.profile import PROFILES, Partition, Profile, ProfileError
from engines.quality import Tier, weights_of
from plugins.block_attention import BlockAttention
from plugins.cut import Cut
from plugins.dimensions import MODALITIES, TIMESTEP_SLOTS, DenoiserDimensions, Dimensions
from plugins.distilled import Distilled
from plugins.exchanges import OPERATORS

SCHEMA_VERSION = 4
"""Changes when a manifest of the last version can no longer be read."""

MANIFEST = "manifest.json"
LOCK = ".lock"

BEGUN = "begun.json"
"""What a store was begun with."""

WEIGHTS = "weights"
"""Directory of a store that its files of quantised weights are in."""

Dtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32", "uint8", "bool"]

ITEM_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}

_HEADER_LIMIT = 100 << 20
"""Largest header that the safetensors format allows, in bytes."""


class StoreError(RuntimeError):
    """A store that must not be served from; says what is wrong, and the command that rebuilds it."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AxisRecord(_Record):
    """Legal sizes of a named axis: minimum to maximum, divisible by `multiple`."""

    minimum: int
    maximum: int
    multiple: int


class TensorRecord(_Record):
    """An input, output or weight of an engine: fixed sizes are ints, dynamic ones are names of axes."""

    name: str
    dtype: Dtype
    shape: tuple[int | str, ...]


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(f"{path!r}: must be the path of a file within the store, relative to it")
    return path


class FileRecord(_Record):
    """A file of the store: path relative to it, and the SHA-256 of its bytes."""

    path: Annotated[str, AfterValidator(_inside)]
    sha256: str


class AxisRange(_Record):
    """The sizes of an axis that one optimisation profile is for: its tactics are chosen at the optimum."""

    minimum: int
    optimum: int
    maximum: int


class PlanRecord(_Record):
    """What the TensorRT builder said of a plan.

    It runs on GPUs of one of the compute `capabilities`, within one of the optimisation `profiles` (ranges by axis),
    in `activation_bytes` of device memory. `layers` is the file of its compiled layers (`engines.layers`), which
    `census` counts by kind. `driver` is that of the building machine, None where it has no GPU.
    """

    capabilities: tuple[str, ...]
    profiles: tuple[dict[str, AxisRange], ...]
    activation_bytes: int
    layers: FileRecord
    census: dict[str, int]
    driver: str | None
    seconds: float
    peak_host_bytes: int
    reproduce: str


class ProgramRecord(_Record):
    """What inductor compiled a graph for.

    It runs on devices of that `target` (`engines.machine.target`), for sizes within `ranges`, by axis. `census` counts
    the registry's operators that it calls as they are.
    """

    target: str
    ranges: dict[str, AxisRange]
    census: dict[str, int]
    seconds: float
    reproduce: str


class EngineRecord(_Record):
    """One graph's engine.

    `file` takes the weights of any instance as inputs. With a profile of baked weights, `baked[partition][instance]` is
    what runs instead: for ONNX Runtime its weights are external data whose locations are the bare names of the
    checkpoint's files, for TensorRT they are inside. `plan` is there for TensorRT only, `program` for
    inductor only; both tell of `file`.
    `key` is the hash of everything that `file` depends on. `difference` is the largest measured |graph - torch eager|
    in ONNX Runtime relative to the output's largest magnitude, at most `tolerance`; None where the weights are files
    without data, which cannot be compared.
    """

    key: str
    file: FileRecord
    baked: dict[Partition, tuple[FileRecord, ...]]
    instances: int
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    weights: tuple[TensorRecord, ...]
    axes: dict[str, AxisRecord]
    opset: int
    census: dict[str, int]
    tolerance: float
    difference: float | None
    plan: PlanRecord | None = None
    program: ProgramRecord | None = None

    @property
    def exchanges(self) -> tuple[int, int]:
        """Operators that exchange between ranks: how many the graph has, and how many its engine was found to have.

        A plan has them once for each of its optimisation profiles.
        """
        wanted = sum(count for kind, count in self.census.items() if kind.rpartition("::")[2] in OPERATORS)
        if self.plan is not None:
            kinds = self.plan.census.items()
            found = sum(n for kind, n in kinds if kind.startswith("collective.") or _is_exchange(kind))
            return wanted * max(1, len(self.plan.profiles)), found
        program = self.program.census if self.program else {}
        return wanted, sum(count for kind, count in program.items() if _is_exchange(kind))


def _is_exchange(kind: str) -> bool:
    """Whether a layer or an operator, of that kind in a census, is one of those that exchange between ranks."""
    return any(name in kind for name in OPERATORS)


class WeightFile(_Record):
    """A safetensors file; `header_sha256` covers its header, which names every tensor's place.

    The path of one that the build has written, of quantised weights, is relative to the store.
    """

    path: str
    size: int
    header_sha256: str


class Region(NamedTuple):
    """Where a weight lies: index of its file, offset from the file's start in bytes, and its shape.

    With a `cut` it is one rank's part of a tensor, in a manifest the first rank's: the others' follow from it.
    """

    file: int
    offset: int
    shape: tuple[int, ...]
    cut: Cut | None = None

    def nbytes(self, dtype: Dtype) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[dtype]

    def of_rank(self, rank: int) -> Region:
        """A rank's part, where this is the first rank's; the whole tensor where no ranks divide it.

        Raises:
            ValueError: there are not so many ranks.
        """
        if self.cut is None:
            return self
        if not 0 <= rank < self.cut.ranks:
            raise ValueError(f"rank {rank}: {self.cut.ranks} ranks divide the tensors; must be below")
        return self._replace(offset=self.offset + rank * self.cut.run)


class AdapterRecord(_Record):
    """An adapter that requests may choose: which weights of the transformer it changes.

    Its own weights are `bindings["PARTITION+NAME"]`, of the graphs that it changes and no others: with "merged" all
    weights of these graphs, changed; with "low_rank" those that their variants have beside the partition's. `path` is
    the artifact that they were made from. `modulates`: it changes AdaLN too, and has tables of its own.
    """

    distilled: Distilled
    partition: Partition
    mode: AdapterMode
    path: str
    modulates: bool


class Extent(NamedTuple):
    """Where in its file a tensor lies: offset from the file's start in bytes, and its shape."""

    offset: int
    shape: tuple[int, ...]


class TableRecord(_Record):
    """The AdaLN parameters of a pinned schedule, computed when the store was built.

    The safetensors file holds, in the modulation graphs' dtype, `blocks` [forwards, layers, M*3, 6*hidden] and `head`
    [forwards, M, 2*hidden]. `weights_sha256` is of the weights that it was made from, of `weights_bytes` in all, and
    `timesteps` [forwards][M] are the slots' (float32); `engine` is the key of the engine that made it.
    """

    file: FileRecord
    dtype: Dtype
    blocks: Extent
    head: Extent
    weights_sha256: str
    weights_bytes: int
    timesteps: tuple[tuple[float, ...], ...]
    engine: str


class CheckpointRecord(_Record):
    """The checkpoint that the weights are read from."""

    root: str
    layout: Literal["native", "diffusers"]
    fingerprint: str


class Begun(_Record):
    """The checkpoint and the profile that a store's finished steps are of.

    `sample` is of the checkpoint's data, of which `fingerprint` says nothing. `adapters`: their SHA-256, by path.
    """

    checkpoint: str
    fingerprint: str
    sample: str
    profile: Profile
    adapters: dict[str, str | None] = {}

    @staticmethod
    def read(store: str | Path) -> Begun:
        """What a build in this store was begun with.

        Raises:
            StoreError: none was.
        """
        try:
            return Begun.model_validate_json((Path(store) / BEGUN).read_bytes())
        except (OSError, ValidationError) as error:
            raise StoreError(f"{store}: no build was begun here that could be resumed; leave out --resume") from error

    def write(self, store: Path) -> None:
        """Notes it in the store, unless the same stands there."""
        path, content = store / BEGUN, self.model_dump_json(indent=1).encode()
        if not path.is_file() or path.read_bytes() != content:
            write_atomically(path, content)


class Manifest(_Record):
    """Everything that running the engines needs to know, and everything that made them.

    `bindings[partition][graph][instance]` maps each weight of the graph, by name, to its region; graphs with low-rank
    sides read those of the graphs without, and an adapter's.

    student: the checkpoint is one that has this schedule and no other. adapters: by name, what requests may choose
    beside the checkpoint itself. tables: the modulation of the pinned schedules, by the same keys as `bindings`. A
    store of a student has no modulation graphs, and binds none of their weights: it has a table for each partition.
    `profile` is as it was written; `attention`, `tiers` and `partitions` are what it is for the checkpoint.
    """

    schema_version: int
    profile: Profile
    versions: dict[str, str]
    checkpoint: CheckpointRecord
    dimensions: Dimensions
    tokenizer: FileRecord
    graphs: dict[str, EngineRecord]
    weight_files: tuple[WeightFile, ...]
    bindings: dict[str, dict[str, tuple[dict[str, Region], ...]]]
    student: Distilled | None = None
    adapters: dict[str, AdapterRecord] = {}
    tables: dict[str, TableRecord] = {}

    def engine_of(self, graph: str, adapter: str | None) -> str:
        """The graph that computes what a graph does, with an adapter's weights."""
        if adapter is None or self.adapters[adapter].mode == "merged" or not self.changes(adapter, graph):
            return graph
        return low_rank_name(graph)

    def changes(self, adapter: str, graph: str) -> bool:
        """Whether an adapter has weights of a graph's."""
        return weights_of(graph) in self.bindings[weights_key(self.adapters[adapter].partition, adapter)]

    def regions(self, graph: str, instance: int, partition: Partition, adapter: str | None = None) -> dict[str, Region]:
        """Where each weight of an instance lies: the partition's, and the adapter's in place of them or beside them."""
        own = self.bindings[partition][without_sides(graph)][instance]
        if adapter is None or not self.changes(adapter, graph):
            return own
        return own | self.bindings[weights_key(partition, adapter)][weights_of(graph)][instance]

    @property
    def serving(self) -> Profile:
        """The profile as it is for this checkpoint."""
        return self.profile.serving(self.student)

    @property
    def attention(self) -> BlockAttention:
        """How the blocks attend in requests that choose no tier."""
        return self.serving.attention.blocks

    @property
    def further_attention(self) -> tuple[BlockAttention, ...]:
        """The attentions that have an engine of their own beside that of `attention`."""
        return self.serving.further_attention

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers of quality that requests may choose; the first is that of requests that choose none."""
        return self.serving.tiers

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The transformers that are served."""
        return self.serving.partitions

    def of_rank(self, rank: int) -> Manifest:
        """What one of the ranks that divide the weights of some graphs binds: its parts of these, and all others."""
        bindings = {
            key: {
                graph: tuple({name: region.of_rank(rank) for name, region in each.items()} for each in instances)
                for graph, instances in graphs.items()
            }
            for key, graphs in self.bindings.items()
        }
        return self.model_copy(update={"bindings": bindings})

    def bound_bytes(self, graphs: Collection[str]) -> int:
        """Bytes of weights that some graphs are bound to, those of all partitions together, each region once."""
        dtypes = {(graph, weight.name): weight.dtype for graph, e in self.graphs.items() for weight in e.weights}
        found = {
            region: region.nbytes(dtypes[graph, name])
            for partition in self.partitions
            for graph, instances in self.bindings[partition].items()
            if graph in graphs
            for regions in instances
            for name, region in regions.items()
        }
        return sum(found.values())


class EngineStore:
    """A verified store: `manifest`, and the bytes of its files."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root = root
        self.manifest = manifest

    @staticmethod
    def open(path: str | Path, to_run: bool = True) -> EngineStore:
        """Reads the manifest and verifies everything it names, and, `to_run` it, that this machine can.

        Raises:
            StoreError: no manifest, another schema version, a missing or changed engine or tokenizer, a missing or
                changed weight file; to run it, a backend that is not installed in the version the engines were made
                with, no GPU of a compute capability that they were made for, a profile that has changed since, or
                several ranks whose engines do not exchange anything.
        """
        root = Path(path)
        store = EngineStore(root, _read_manifest(root))
        if to_run:
            store._verify_backend()
            store._verify_profile()
            store._verify_ranks()
            store._verify_gpus()
        for record in store._files():
            store._verify_file(record)
        for weights in store.manifest.weight_files:
            store._verify_weights(weights)
        for problem in (*store._unbound(), *store._untabled()):
            raise store._error(f"{root / MANIFEST}: {problem}")
        return store

    def of_rank(self, rank: int) -> EngineStore:
        """The store as one of the ranks that divide the tensors of some graphs sees it: its weights are that rank's."""
        return EngineStore(self.root, self.manifest.of_rank(rank))

    @property
    def tokenizer_file(self) -> Path:
        """The checkpoint's tokenizer.json, as copied into the store."""
        return self.root / self.manifest.tokenizer.path

    def read(self, record: FileRecord) -> bytes:
        """The bytes of one of the store's files, the very ones that were verified.

        Raises:
            StoreError: the file is missing or is not the one that was built.
        """
        path = self.root / record.path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise self._error(f"{path}: cannot be read: {error.strerror}") from error
        self._verify_sha256(record, hashlib.sha256(content).hexdigest())
        return content

    def _verify_file(self, record: FileRecord) -> None:
        path = self.root / record.path
        try:
            found = file_sha256(path)
        except OSError as error:
            raise self._error(f"{path}: cannot be read: {error.strerror}") from error
        self._verify_sha256(record, found)

    def _verify_sha256(self, record: FileRecord, found: str) -> None:
        if found != record.sha256:
            raise self._error(
                f"{self.root / record.path}: is not the file that was built: SHA-256 {record.sha256} expected, "
                f"{found} found"
            )

    def _files(self) -> list[FileRecord]:
        engines = self.manifest.graphs.values()
        baked = [file for engine in engines for files in engine.baked.values() for file in files]
        layers = [engine.plan.layers for engine in engines if engine.plan is not None]
        tables = [table.file for table in self.manifest.tables.values()]
        return [self.manifest.tokenizer, *(engine.file for engine in engines), *baked, *layers, *tables]

    def _verify_backend(self) -> None:
        package = self.manifest.profile.backend
        built = self.manifest.versions.get(package, "of an unknown version")
        try:
            installed = backend_version(package)
        except BackendMissing as missing:
            raise StoreError(f"{self.root}: its engines run on {package} {built}, but {missing}") from None
        if installed != built:
            raise self._error(f"{self.root}: built for {package} {built}, but {package} {installed} is installed")

    def _verify_profile(self) -> None:
        """A profile's file, where it is still there, must say what it said when the engines were built."""
        built = self.manifest.profile
        try:
            now = Profile.load(built.name)
        except ProfileError:
            return
        for key in Profile.model_fields:
            before, after = getattr(built, key), getattr(now, key)
            if before != after:
                raise self._error(f"{self.root}: built with {key} = {before}, but profile {built.name} has {after}")

    def _verify_ranks(self) -> None:
        """Ranks that share a stage must exchange data: without, each would attend to its own rows alone."""
        profile = self.manifest.profile
        for stage, ranks in profile.ranks:
            if ranks > 1 and not self._exchanges(stage, ranks):
                raise self._error(
                    f"{self.root}: profile {profile.name} has ranks.{stage} = {ranks}, but its engines are those of "
                    f"one rank: no exchange between ranks is among their layers, and none is between them"
                )
        for name, engine in self.manifest.graphs.items():
            wanted, found = engine.exchanges
            if found != wanted:
                raise self._error(
                    f"{self.root}: graph {name}: its engine must have {wanted} exchanges between ranks, and {found} "
                    f"are among its layers"
                )

    def _exchanges(self, stage: str, ranks: int) -> bool:
        """Whether the engines of a stage are a rank's: with an exchange inside, or for one between them."""
        graphs, dimensions = self.manifest.graphs, self.manifest.dimensions
        if stage == "video_tiles":
            return True  # each tile is decoded by one rank
        if stage == "ulysses" and (attend := graphs.get("block.attend")):
            return all(spec.shape[1] * ranks == dimensions.denoiser.heads for spec in attend.inputs[:3])
        if stage == "text_encoder" and "text_encoder.layer.attend" in graphs:
            return graphs["text_encoder.embedding"].outputs[0].shape[1] * ranks == dimensions.text_encoder.hidden
        part = "text_encoder.layer" if stage == "text_encoder" else "block"
        found = [sum(engine.exchanges) for name, engine in graphs.items() if name.startswith(part)]
        return bool(found) and all(found)

    def _verify_gpus(self) -> None:
        """Every GPU that the profile uses must be of a compute capability that every plan was built for."""
        built = [set(e.plan.capabilities) for e in self.manifest.graphs.values() if e.plan is not None]
        if not built:
            return
        profile, found = self.manifest.profile, machine.gpu_capabilities()
        if len(found) < profile.gpus:
            raise StoreError(
                f"{self.root}: profile {profile.name} runs on {profile.gpus} GPUs, but {len(found)} are found; "
                f"run: h3trt doctor --profile {profile.name}"
            )
        legal = set.intersection(*built)
        for index, capability in enumerate(found[: profile.gpus]):
            if capability not in legal:
                raise self._error(
                    f"{self.root}: built for compute capability {', '.join(sorted(legal))}, but GPU {index} has "
                    f"{capability}"
                )

    def _verify_weights(self, expected: WeightFile) -> None:
        try:
            found = weight_file(Path(expected.path))
        except (OSError, ValueError) as error:
            raise self._error(f"weight file {expected.path}: {error}") from error
        if found.size != expected.size:
            raise self._error(f"weight file {expected.path}: {expected.size:,} bytes expected, {found.size:,} found")
        if found.header_sha256 != expected.header_sha256:
            raise self._error(
                f"weight file {expected.path}: its header has changed: SHA-256 {expected.header_sha256} expected, "
                f"{found.header_sha256} found"
            )

    def _unbound(self) -> Iterator[str]:
        """Instances whose weights are not those of their graph, each within one of the weight files."""
        for partition in self.manifest.partitions:
            bound = self.manifest.bindings.get(partition, {})
            for name, engine in self.manifest.graphs.items():
                if not has_sides(name):
                    yield from self._misbound(f"bindings.{partition}.{name}", engine, bound.get(name, ()))
        for adapter, record in self.manifest.adapters.items():
            yield from self._unbound_of(adapter, record)

    def _unbound_of(self, adapter: str, record: AdapterRecord) -> Iterator[str]:
        """The same of the graphs that an adapter changes."""
        key = weights_key(record.partition, adapter)
        graphs, own = self.manifest.graphs, self.manifest.bindings.get(record.partition, {})
        for name, changed in self.manifest.bindings.get(key, {}).items():
            engine = graphs.get(low_rank_name(name) if record.mode == "low_rank" else name)
            if engine is None or len(changed) != len(own.get(name, ())):
                yield f"bindings.{key}.{name}: a graph of the store, and its instances, expected"
                continue
            together = [a | b for a, b in zip(own[name], changed, strict=True)]
            yield from self._misbound(f"bindings.{key}.{name}", engine, together)
        if not self.manifest.bindings.get(key):
            yield f"bindings.{key}: weights of adapters.{adapter} expected, none found"

    def _misbound(self, place: str, engine: EngineRecord, instances: Sequence[Mapping[str, Region]]) -> Iterator[str]:
        sizes = [file.size for file in self.manifest.weight_files]
        if len(instances) != engine.instances:
            yield f"{place}: {engine.instances} instances expected, {len(instances)} found"
        for index, regions in enumerate(instances):
            wrong = [w.name for w in engine.weights if not _lies_in(sizes, regions.get(w.name), w.dtype)]
            if wrong or len(regions) != len(engine.weights):
                what = wrong[0] if wrong else "a weight that the graph does not have"
                yield f"{place}.{index}: {what}: not within the weight files"

    def _untabled(self) -> Iterator[str]:
        """Schedules that have no tables where they must, and tables that are not of a schedule."""
        manifest = self.manifest
        pinned = {weights_key(a.partition, n): a.distilled for n, a in manifest.adapters.items() if a.modulates}
        if manifest.student is not None:
            pinned |= dict.fromkeys(manifest.partitions, manifest.student)
        for name, distilled in pinned.items():
            if name not in manifest.tables:
                yield f"tables.{name}: is missing; {distilled.name} pins its schedule"
        for name, table in manifest.tables.items():
            if name not in pinned:
                yield f"tables.{name}: is of no student, and of no adapter that changes AdaLN"
                continue
            length = (self.root / table.file.path).stat().st_size
            for problem in _misfits(table, pinned[name].schedule.forwards, manifest.dimensions.denoiser, length):
                yield f"tables.{name}.{problem}"

    def _error(self, text: str) -> StoreError:
        return StoreError(f"{text}; {rebuild_advice(self.root)}")


def _misfits(table: TableRecord, forwards: int, size: DenoiserDimensions, length: int) -> Iterator[str]:
    """What tables of a schedule of so many forwards have against them, in a file of so many bytes."""
    if [len(slots) for slots in table.timesteps] != [TIMESTEP_SLOTS] * forwards:
        yield f"timesteps: {forwards} steps of {TIMESTEP_SLOTS} slots expected"
    blocks = (forwards, size.layers, TIMESTEP_SLOTS * MODALITIES, 6 * size.hidden)
    head = (forwards, TIMESTEP_SLOTS, 2 * size.hidden)
    for name, extent, shape in (("blocks", table.blocks, blocks), ("head", table.head, head)):
        nbytes = math.prod(shape) * ITEM_BYTES[table.dtype]
        if extent.shape != shape or not 0 <= extent.offset <= length - nbytes:
            yield f"{name}: {list(shape)} within the file's {length:,} bytes expected"


def _lies_in(sizes: list[int], region: Region | None, dtype: Dtype) -> bool:
    """Whether a weight is bound to bytes of a file; `sizes` has the files' lengths."""
    if region is None or not 0 <= region.file < len(sizes) or min(region.shape, default=1) < 0:
        return False
    nbytes = region.nbytes(dtype)
    if region.cut is not None:
        run, pitch = region.cut
        if run < 1 or nbytes % run or pitch < run or pitch % run:
            return False
        # That is so of all ranks' parts together.
        nbytes = nbytes // run * pitch
    return 0 <= region.offset <= sizes[region.file] - nbytes


def rebuild_command(store: Path, profile: str, checkpoint: str | Path, adapters: Iterable[str] = ()) -> str:
    """The command line that builds this store, or builds it again; its words are quoted for a shell."""
    options = ["--profile", profile, "--checkpoint", str(checkpoint), "--store", str(store.absolute())]
    options += [word for adapter in adapters for word in ("--adapter", adapter)]
    return shlex.join(["h3trt", "engines", "build", *options])


def rebuild_advice(store: Path) -> str:
    """How to build a store: its command, or, where no manifest tells, the command with words to be replaced."""
    try:
        outline = _Outline.model_validate_json((store / MANIFEST).read_bytes())
    except (OSError, ValidationError):
        if (store / BEGUN).is_file() and not (store / MANIFEST).exists():
            return _resume_advice(store)
        shipped = store.name in {path.stem for path in PROFILES.glob("*.toml")}
        command = rebuild_command(store, store.name if shipped else "PROFILE", "CHECKPOINT")
        words = "the checkpoint's directory" if shipped else "the profile and the checkpoint's directory"
        return f"nothing here tells what it was built from; to build, run, with {words} put in: {command}"
    adapters = [adapter.path for adapter in outline.adapters.values()]
    command = rebuild_command(store, outline.profile.name, outline.checkpoint.root, adapters)
    return f"to rebuild, run: {command}"


def _resume_advice(store: Path) -> str:
    try:
        begun = Begun.read(store)
    except StoreError as error:
        return str(error)
    command = rebuild_command(store, begun.profile.name, begun.checkpoint, begun.adapters)
    return f"its build was begun and not finished; to go on, run: {command} --resume"


def weight_file(path: Path) -> WeightFile:
    """Identifies a safetensors file by its path, size and header.

    Raises:
        OSError: it cannot be read.
        ValueError: its header does not fit in it.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ValueError(f"a header of {length:,} bytes does not fit in a file of {size:,} bytes")
        header = file.read(length)
    return WeightFile(path=str(path), size=size, header_sha256=hashlib.sha256(header).hexdigest())


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that a reader, or a crash, sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read_manifest(root: Path) -> Manifest:
    path = root / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}; {rebuild_advice(root)}") from error
    version = _schema_version(root, content)
    if version != SCHEMA_VERSION:
        found = f"schema version {SCHEMA_VERSION} expected, {version} found"
        raise StoreError(f"{path}: {found}; {rebuild_advice(root)}")
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        problem = first["msg"].removeprefix("Value error, ")
        raise StoreError(f"{path}: {place}: {problem}; {rebuild_advice(root)}") from error
    # A file that lies in the store is found wherever the store is.
    weights = tuple(file.model_copy(update={"path": str(root / file.path)}) for file in manifest.weight_files)
    return manifest.model_copy(update={"weight_files": weights})


class _OutlineProfile(BaseModel):
    name: str


class _OutlineCheckpoint(BaseModel):
    root: str


class _OutlineAdapter(BaseModel):
    path: str


class _Outline(BaseModel):
    """What the manifest of every version has: enough to say which version it is, and how to make it anew."""

    schema_version: int
    profile: _OutlineProfile
    checkpoint: _OutlineCheckpoint
    adapters: dict[str, _OutlineAdapter] = {}


def _schema_version(root: Path, content: bytes) -> int:
    try:
        return _Outline.model_validate_json(content).schema_version
    except ValidationError as error:
        raise StoreError(f"{root / MANIFEST}: is not a manifest; {rebuild_advice(root)}") from error

"""A hardware profile: one TOML file that says what runs where, in which precision, and within which limits.

The GPU that a profile names is described once, in `engines/devices`, for all profiles of that GPU.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from engines import machine
from engines.adapters import AdapterMode
from engines.quality import Tier, further_engines
from plugins.block_attention import ATTENTIONS, BlockAttention, ChosenAttention, skips
from plugins.distilled import ArtifactTask, Distilled

PROFILES = Path(__file__).parent / "profiles"
"""Directory of the profiles that are shipped."""

DEVICES = Path(__file__).parent / "devices"
"""Directory of the descriptions of GPUs."""

_MEMORY = re.compile(r"(?P<number>[0-9]{1,9}(\.[0-9]{1,9})?) *(?P<unit>%|MiB|GiB)")
_MEMORY_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}

MOST_THREADS = 1024

MOST_CPU_RANKS = 64
"""Processes that may share a stage on CPUs."""

MOST_QUOTED = 200
"""Characters of a wrong value that its error quotes."""

_OF_A_KEY = "[key]"
"""Where pydantic says that not a table's value is wrong, but its key."""

_MUST = ("Input should be", "must be")

_RULES = {
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "dict_type": "must be a table",
    "model_type": "must be a table",
}
"""What the file's language calls the kinds of values that pydantic names in Python's."""

Partition = Literal["fl2va", "ref2va"]
PARTITIONS: tuple[Partition, ...] = get_args(Partition)

PARTITION_OF: Mapping[ArtifactTask, Partition] = {"t2va": "fl2va", "fl2va": "fl2va", "ref2va": "ref2va"}
"""The set of transformer weights that serves a task."""

Backend = Literal["onnxruntime", "tensorrt", "tensorrt_rtx", "inductor"]

Arithmetic = Literal["float32", "float16", "bfloat16", "fp8", "nvfp4"]
"""How a component's matrix products are computed; fp8 and nvfp4 quantise the linears and leave the rest bfloat16."""

Place = Literal["resident", "swapped", "streamed"]
"""Where a component's weights live: on the GPU from start to end; there while its stage runs; in host memory, passing
through two slots on the GPU one instance at a time."""

Component = Literal[
    "text_encoder", "video_encoder", "audio_encoder", "modulation", "denoiser", "video_decoder", "audio_decoder"
]
"""What a graph's residency is chosen by."""

COMPONENTS: tuple[Component, ...] = get_args(Component)

_COMPONENTS: dict[str, Component] = {
    "text_encoder": "text_encoder",
    "vision_encoder": "text_encoder",
    "context": "text_encoder",
    "video_encoder_tile": "video_encoder",
    "audio_encoder": "audio_encoder",
    "modulation": "modulation",
    "video_decoder_tile": "video_decoder",
    "audio_decoder": "audio_decoder",
}
"""By the first part of a graph's name; all others are the denoiser's."""


def component_of(graph: str) -> Component:
    """The component that a graph belongs to.

    The vision encoder and `context` go with the text encoder: they run once a request, one after the other.
    """
    return _COMPONENTS.get(graph.partition(".")[0], "denoiser")


AXES = (
    "rows",
    "text_rows",
    "video_rows",
    "audio_rows",
    "audio_latents",
    "vision_rows",
    "clip_frames",
    "audio_samples",
)
"""Named axes of the graphs whose sizes a profile may limit."""


class ProfileError(ValueError):
    """A profile that cannot be used; says file, key, value and rule."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


_T = TypeVar("_T", bound=_Table)


class Device(_Table):
    """One kind of GPU: its memory, what its arithmetic and its links are rated at (dense, per second), and its class.

    `source` says where the figures come from. Rates are in units of 10^12 operations (without sparsity, sums in
    float32) or 10^9 bytes; links are those of one GPU in one direction; `peer` is 0 where GPUs exchange over the host.
    `nvfp4` is 0 where there is no such unit. `memory_mib` is what nvidia-smi reports as total. `unified`: the GPU
    has no memory of its own, it shares the host's.
    """

    name: str
    title: str
    capability: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    memory_mib: Annotated[int, Field(gt=0)]
    unified: bool = False
    float32_tflops: Annotated[float, Field(gt=0)]
    bfloat16_tflops: Annotated[float, Field(gt=0)]
    fp8_tflops: Annotated[float, Field(gt=0)]
    nvfp4_tflops: Annotated[float, Field(ge=0)]
    memory_gbps: Annotated[float, Field(gt=0)]
    peer_gbps: Annotated[float, Field(ge=0)]
    host_gbps: Annotated[float, Field(gt=0)]
    source: str

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory."""
        return self.memory_mib << 20

    def tflops(self, arithmetic: Arithmetic) -> float:
        """Rate of matrix products in an arithmetic, in units of 10^12 operations a second."""
        halves = {"float16": self.bfloat16_tflops, "bfloat16": self.bfloat16_tflops}
        rates = halves | {"float32": self.float32_tflops}
        return (rates | {"fp8": self.fp8_tflops, "nvfp4": self.nvfp4_tflops})[arithmetic]


class Precision(_Table):
    """Arithmetic of each component. The vision encoder's is the text encoder's, but never quantised. The video encoder,
    the audio encoder and decoder, and what else the model pins, are float32 in all of them."""

    text_encoder: Literal["float32", "bfloat16", "fp8"]
    denoiser: Literal["float32", "bfloat16", "fp8", "nvfp4"]
    video_decoder: Literal["float32", "float16", "bfloat16"]


class Skipping(_Table):
    """What attention leaves out, where it is one that skips.

    `skip_threshold` is the weight, relative to a row's largest, below which tiles of keys are left out by "skip" and
    "sage+skip"; only in steps whose video sigma is at most `skip_below`: what is decided while nearly all is noise
    decides the most.
    """

    skip_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    skip_below: Annotated[float, Field(ge=0, le=1)] = 0.97


def _chosen(value: object) -> object:
    if value not in ATTENTIONS:
        raise ValueError(f"must be {', '.join(map(repr, ATTENTIONS[:-1]))} or {ATTENTIONS[-1]!r}")
    return value


class Attention(Skipping):
    """Attention of the transformer's blocks and of the refiner's, in requests that choose no tier."""

    blocks: Annotated[BlockAttention, BeforeValidator(_chosen)]
    refiner: Literal["dense"]


class Adapters(_Table):
    """How the store offers adapters that requests choose between.

    "low_rank" takes little memory, and a little time in each of their requests; "merged" takes the memory of the
    transformer's linears once more for each adapter, and no time.
    """

    mode: AdapterMode = "low_rank"


ROW_MULTIPLE = 64
"""Rows that each GPU of a sequence-parallel group holds are a multiple of this, for the tiles of its kernels."""


class Ranks(_Table):
    """How many processes share each stage: the packed rows (Ulysses), the text encoder's tensors, the video tiles.

    Each has a GPU of its own, where there are GPUs; on a CPU they share its processors and memory.
    """

    ulysses: Annotated[int, Field(ge=1)]
    text_encoder: Annotated[int, Field(ge=1)]
    video_tiles: Annotated[int, Field(ge=1)]

    def serving(self, stages: Collection[str]) -> Ranks:
        """Those of a server of some stages of encode, denoise and decode: one for what it does not serve."""
        shared = {"text_encoder": "encode", "ulysses": "denoise", "video_tiles": "decode"}
        return Ranks(**{key: ranks if shared[key] in stages else 1 for key, ranks in self})

    @property
    def processes(self) -> int:
        """How many processes serve together."""
        return max(ranks for _, ranks in self)


ONE_RANK = Ranks(ulysses=1, text_encoder=1, video_tiles=1)


class Residency(_Table):
    """Where weights live. `denoiser` may be the number of blocks of each partition that stay on the GPU, the others
    being streamed. Where something is swapped, one partition's transformer is on the GPU at a time."""

    text_encoder: Place
    video_encoder: Place
    audio_encoder: Place
    modulation: Place
    denoiser: Literal["resident", "swapped"] | Annotated[int, Field(ge=0)]
    video_decoder: Place
    audio_decoder: Place

    @field_validator("denoiser", mode="before")
    @classmethod
    def _blocks(cls, value: object) -> object:
        if value not in ("resident", "swapped") and (type(value) is not int or value < 0):
            raise ValueError('must be "resident", "swapped", or the number of blocks that stay on the GPU')
        return value

    def of(self, component: Component) -> Place | int:
        """Where a component's weights live."""
        place: Place | int = getattr(self, component)
        return place


def _ascending(value: object) -> object:
    sizes = value if isinstance(value, list | tuple) else ()
    whole = all(type(size) is int for size in sizes)
    if not sizes or not whole or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError("must be a list of whole numbers from 1, each above the one before")
    return value


Ends = Annotated[tuple[int, ...], Field(strict=False), BeforeValidator(_ascending)]
"""Upper ends of ranges of sizes."""


class Profile(_Table):
    """The typed content of a profile file; `name` is what `load` finds it by: a shipped name, else the file's path.

    `shapes[axis]` lists the upper ends of the ranges of sizes that engines are optimised for, ascending; the last is
    the largest legal size. They are sizes of a whole request, whatever the ranks.
    `quality` has the further tiers that a request may choose, by the attention of their blocks.
    `row_chunk` is the most rows that go through the row-local parts of a block at once, 0 for all of them. `threads`
    and `memory` are those of the machine, which the ranks divide on a CPU. A CPU has no device, residency or shapes.
    """

    name: str
    backend: Backend
    device: Device | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    weights: Literal["bound", "baked"]
    partitions: Annotated[tuple[Partition, ...], Field(min_length=1, strict=False)]
    precision: Precision
    attention: Attention
    quality: dict[ChosenAttention, Skipping] = {}
    adapters: Adapters = Adapters()
    ranks: Ranks = ONE_RANK
    residency: Residency | None = None
    row_chunk: Annotated[int, Field(ge=0)] = 0
    shapes: dict[Literal[AXES], Ends] = {}  # type: ignore[valid-type]
    threads: int | Literal["auto"]
    memory: str

    @field_validator("partitions")
    @classmethod
    def _each_once(cls, value: tuple[Partition, ...]) -> tuple[Partition, ...]:
        if len(set(value)) < len(value):
            raise ValueError("must name each partition once")
        if "fl2va" not in value:
            raise ValueError("must name fl2va, which text to video and audio runs on")
        return value

    @field_validator("threads", mode="before")
    @classmethod
    def _count(cls, value: object) -> object:
        if value != "auto" and (type(value) is not int or not 1 <= value <= MOST_THREADS):
            raise ValueError(f'must be a whole number from 1 to {MOST_THREADS}, or "auto"')
        return value

    @field_validator("memory", mode="before")
    @classmethod
    def _amount(cls, value: object) -> object:
        match = _MEMORY.fullmatch(value) if isinstance(value, str) else None
        if not match or not (0 < float(match["number"]) <= (100 if match["unit"] == "%" else float("inf"))):
            raise ValueError('must be a share such as "80%" (above 0%, at most 100%) or an amount such as "12 GiB"')
        return value

    @model_validator(mode="after")
    def _fits_its_backend(self) -> Profile:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    @staticmethod
    def load(profile: str | Path) -> Profile:
        """Reads a shipped profile by name, or a file by path (a name with the suffix `.toml`).

        Raises:
            ProfileError: no such profile, not TOML, a missing or unknown key, an illegal value.
        """
        path = _find(profile)
        name = path.stem if path.parent == PROFILES else str(path.absolute())
        table = _read(path)
        if "device" in table:
            table["device"] = _device(path, table["device"])
        return _parse(Profile, path, name, table)

    @cached_property
    def on_gpu(self) -> bool:
        """Whether engines are for a GPU; inductor compiles for a CPU where no device is named."""
        return self.backend.startswith("tensorrt") or (self.device is not None and self.backend == "inductor")

    def serving(self, student: Distilled | None) -> Profile:
        """The profile as it is for a model: what its engines are built and its requests served by.

        A student has the transformers of its tasks. One that has learned to attend to a part of the video attends so,
        and has that one tier.
        """
        if student is None:
            return self
        served = {PARTITION_OF[task] for task in student.tasks}
        changes: dict[str, Any] = {"partitions": tuple(one for one in self.partitions if one in served)}
        if student.video_sparse is not None:
            unskipped = Skipping().model_dump()
            changes["attention"] = self.attention.model_copy(update={**unskipped, "blocks": "vsa"})
            changes["quality"] = {}
        return self.model_copy(update=changes)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers of quality that requests may choose; the first is that of requests that choose none."""
        kinds: list[tuple[BlockAttention, Skipping]] = [(self.attention.blocks, self.attention), *self.quality.items()]
        return tuple(
            Tier(
                linears=self.precision.denoiser,
                attention=kind,
                skip_threshold=skipping.skip_threshold,
                skip_below=skipping.skip_below,
            )
            for kind, skipping in kinds
        )

    @property
    def further_attention(self) -> tuple[BlockAttention, ...]:
        """The attentions of blocks that have an engine of their own beside the one of `attention.blocks`."""
        return further_engines(self.attention.blocks, self.quality)

    @property
    def segmented(self) -> bool:
        """Whether a block is three engines. ONNX Runtime's ranks exchange between engines, not within one."""
        return self.row_chunk > 0 or (self.backend == "onnxruntime" and self.ranks.ulysses > 1)

    def local_rows(self, rows: int) -> int:
        """Of so many packed rows, those that each rank holds; the last ranks' may end in padding."""
        multiple = ROW_MULTIPLE if self.on_gpu and self.ranks.ulysses > 1 else 1
        return multiple * math.ceil(rows / self.ranks.ulysses / multiple)

    @cached_property
    def axis_ends(self) -> dict[str, tuple[int, ...]]:
        """Upper ends of the ranges of sizes that engines are optimised for, by axis: `shapes`, and what follows of it.

        Where ranks share the rows, an end of the sequence is one that fills all of them: whatever is within it, is
        within the ranks' as well.
        """
        ends: dict[str, tuple[int, ...]] = dict(self.shapes)
        if self.row_chunk:
            ends["chunk_rows"] = (self.row_chunk,)
        if self.ranks.ulysses > 1 and "rows" in ends:
            ends["local_rows"] = tuple(sorted({self.local_rows(end) for end in ends["rows"]}))
            ends["rows"] = tuple(self.ranks.ulysses * end for end in ends["local_rows"])
        return ends

    def thread_count(self) -> int:
        """Threads of one session on this machine."""
        threads = machine.available_processors() if self.threads == "auto" else self.threads
        return threads if self.on_gpu else max(1, threads // self.ranks.processes)

    def memory_budget(self, machine_bytes: int) -> int:
        """Bytes of host memory that one process may use for a request on a machine with that much."""
        match = _MEMORY.fullmatch(self.memory)
        if match is None:
            raise ProfileError(f"memory = {self.memory!r}: neither a share nor an amount")
        number, unit = float(match["number"]), match["unit"]
        wanted = machine_bytes * number / 100 if unit == "%" else number * _MEMORY_UNITS[unit]
        return min(machine_bytes, int(wanted)) // (1 if self.on_gpu else self.ranks.processes)

    def _problems(self) -> list[str]:
        """What each key has against the others, as "key = value: rule"."""
        found = self._gpu_problems() if self.on_gpu else self._cpu_problems()
        found += self._tier_problems()
        if self.backend == "inductor" and self.weights == "baked":
            found.append("weights = 'baked': must be 'bound' with backend = 'inductor'")
        if self.ranks.text_encoder > 1 and self.weights == "baked":
            rule = "each rank has parts of weights, which engines that hold all of them would not share"
            found.append(
                f"weights = 'baked': must be 'bound' with ranks.text_encoder = {self.ranks.text_encoder}: {rule}"
            )
        most, reason = (max(1, self.gpus), f"gpus = {self.gpus}") if self.on_gpu else (MOST_CPU_RANKS, MOST_CPU_RANKS)
        for stage, ranks in self.ranks:
            if ranks > most:
                found.append(f"ranks.{stage} = {ranks}: must be at most {reason}")
        return found

    def _tier_problems(self) -> list[str]:
        base = self.attention.blocks
        places: dict[str, tuple[BlockAttention, Skipping]] = {"attention": (base, self.attention)}
        places |= {f"quality.{kind}": (kind, skipping) for kind, skipping in self.quality.items()}
        found = [problem for place, tier in places.items() for problem in self._attention_problems(place, *tier)]
        if base in self.quality:
            found.append(f"quality.{base}: must not be given; attention.blocks = {base!r} is the first tier")
        if self.quality and self.weights == "baked":
            rule = "must not be given with weights = 'baked', where each engine has its own; must be 'bound'"
            found.append(f"quality.{next(iter(self.quality))}: {rule}")
        return found

    def _attention_problems(self, place: str, kind: BlockAttention, skipping: Skipping) -> Iterator[str]:
        """What one tier, at its place in the file, has against it."""
        if skips(kind) != (skipping.skip_threshold > 0):
            rule = "must be above 0 with blocks that skip, and only with these"
            yield f"{place}.skip_threshold = {skipping.skip_threshold:g}: {rule}"
        key = f"attention.blocks = {kind!r}" if place == "attention" else place
        if kind != "dense" and self.backend == "tensorrt_rtx":
            yield f"{key}: 'tensorrt_rtx' has no plugins, and so no kernels for it; 'tensorrt' and 'inductor' have"
        if kind != "dense" and self.backend == "inductor" and self.device is None:
            yield f"{key}: 'inductor' has kernels for it on GPUs only; on a CPU 'onnxruntime' has its function bodies"

    def _cpu_problems(self) -> list[str]:
        given = [key for key in ("device", "residency", "shapes", "gpus") if getattr(self, key)]
        rule = f"must not be given with backend = {self.backend!r} on the CPU"
        found = [f"{given[0]}: {rule}"] if given else []
        wide = [f"precision.{k} = {v!r}" for k, v in self.precision if v != "float32"]
        return found + [f"{key}: must be 'float32' with backend = {self.backend!r} on the CPU" for key in wide]

    def _gpu_problems(self) -> list[str]:
        missing = [key for key in ("device", "residency", "gpus", "shapes") if not getattr(self, key)]
        found = [f"{key}: is missing; backend = {self.backend!r} needs it" for key in missing]
        found += [f"shapes.{axis}: is missing" for axis in AXES if self.shapes and axis not in self.shapes]
        if self.device is not None and self.precision.denoiser == "nvfp4" and not self.device.nvfp4_tflops:
            rule = f"{self.device.title} has no such units; must be fp8 or bfloat16"
            found.append(f"precision.denoiser = 'nvfp4': {rule}")
        return found


def _find(profile: str | Path) -> Path:
    path = Path(profile)
    if path.suffix != ".toml":
        path = PROFILES / f"{profile}.toml"
    if not path.is_file():
        shipped = ", ".join(sorted(p.stem for p in PROFILES.glob("*.toml")))
        raise ProfileError(f"profile {str(profile)!r}: no file {path}; shipped profiles: {shipped}")
    return path


def _device(path: Path, name: object) -> Device:
    known = sorted(p.stem for p in DEVICES.glob("*.toml"))
    if name not in known:
        raise ProfileError(f"{path}: device = {name!r}: must be one of {', '.join(known)} (files of {DEVICES})")
    file = DEVICES / f"{name}.toml"
    return _parse(Device, file, str(name), _read(file))


def _read(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except RecursionError:
        raise ProfileError(f"{path}: not a profile: its values are nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: not a TOML file: {error}") from error
    if "name" in table:
        raise ProfileError(f"{path}: name = {table['name']!r}: must not be given; it is named by its file")
    return table


def _parse(kind: type[_T], path: Path, name: str, table: dict[str, Any]) -> _T:
    try:
        return kind.model_validate({"name": name, **table})
    except ValidationError as error:
        raise ProfileError("\n".join(_explain(kind, path, e) for e in error.errors())) from error


def _explain(kind: type[_Table], path: Path, error: Any) -> str:
    """One line for one of pydantic's errors: file, key, value, rule."""
    named = [part for part in error["loc"] if part != _OF_A_KEY]
    key = ".".join(str(part) for part in named)
    message = _RULES.get(error["type"]) or error["msg"].removeprefix("Value error, ").replace(*_MUST)
    if error["type"] == "missing":
        return f"{path}: {key}: is missing"
    if error["type"] == "extra_forbidden":
        known = _keys(kind, error["loc"][:-1])
        close = get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
        return f"{path}: {key} = {_quote(error['input'])}: unknown key; {hint}"
    if _OF_A_KEY in error["loc"]:
        return f"{path}: {key}: unknown key; {message}"
    return f"{path}: {key} = {_quote(error['input'])}: {message}" if key else f"{path}: {message}"


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}..."


def _keys(kind: type[_Table], place: tuple[Any, ...]) -> list[str]:
    """The keys that a table may have; `place` is where in the file it is."""
    for part in place:
        if part not in kind.model_fields:
            continue  # a key of a table of tables, which are all of one kind
        annotation = kind.model_fields[part].annotation
        kind = next(t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, _Table))
    return [key for key in kind.model_fields if key != "name"]

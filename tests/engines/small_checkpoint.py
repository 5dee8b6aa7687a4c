"""A checkpoint of two tiny graphs on real safetensors files: builds in seconds, and can be damaged at will."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engines.profile import Profile
from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.hashes import read_sums, verify_sums
from export.graphs.graph import Axis, Graph, TensorSpec
from plugins.dimensions import (
    AudioVAEDimensions,
    DenoiserDimensions,
    Dimensions,
    Processor,
    TextEncoderDimensions,
    VideoVAEDimensions,
    VisionDimensions,
)
from plugins.distilled import Distilled
from plugins.ops import attention

HEADS, HEAD, WIDTH = 2, 8, 12
ROWS = Axis("rows", 2, 4096)
FEATURES = Axis("features", 1, 64)
STEPS = Axis("steps", 2, 8, multiple=2)
TABLE_FEATURES = (6, 10)
"""Outputs of the two instances of `table`."""

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class Attend(nn.Module):
    """Residual self-attention over rows [rows, WIDTH], with a bias at an odd place in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            x.reshape(1, -1, HEADS, HEAD).transpose(1, 2) for x in self.qkv(hidden).split(HEADS * HEAD, dim=-1)
        )
        mixed: torch.Tensor = attention.OP(query, key, value, HEAD**-0.5, 1)
        return hidden + self.out(mixed.transpose(1, 2).reshape(-1, HEADS * HEAD))


class Table(nn.Module):
    """A linear map of chosen rows; its outputs differ between instances."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(TABLE_FEATURES[0], WIDTH))

    def forward(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows.index_select(0, index), self.weight)


@dataclass(frozen=True)
class SmallCheckpoint:
    """Stands in for `export.checkpoint.Checkpoint`: each partition is one file, `<root>/<partition>.safetensors`."""

    root: Path
    layout: str = "native"
    partitions: tuple[str, ...] = ("fl2va", "ref2va")
    fingerprint: str = "f" * 64
    student: Distilled | None = None

    @staticmethod
    def open(path: Path) -> SmallCheckpoint:
        return SmallCheckpoint(path)

    @cached_property
    def dimensions(self) -> Dimensions:
        return dimensions()

    @property
    def tokenizer_file(self) -> Path:
        return self.root / "tokenizer.json"

    @property
    def sample(self) -> str:
        files = (self.root / f"{partition}.safetensors" for partition in self.partitions)
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    def listed_files(self) -> tuple[Path, ...]:
        return tuple(read_sums(self.root))

    def verify_hashes(self) -> tuple[Path, ...]:
        return verify_sums(self.root, lambda file: None)

    def config(self, component: str, partition: str) -> dict[str, Any]:
        return {"component": component}

    def stored(self, component: str, partition: str = "fl2va") -> Mapping[str, Stored]:
        return read(self.root / f"{partition}.safetensors") if component == "denoiser" else {}


def write(root: Path, seed: int) -> Path:
    """Writes both partitions and a tokenizer."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "tokenizer.json").write_text('{"model": {}}')
    for offset, partition in enumerate(("fl2va", "ref2va")):
        generator = torch.Generator().manual_seed(2 * seed + offset)
        save(root / f"{partition}.safetensors", tensors(generator))
    return root


def tensors(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Everything a partition holds. The odd number of bfloat16 items before the float32 biases misaligns them."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    values = {"rope.inv_freq": draw(3).bfloat16()}
    for i in range(2):
        values[f"blocks.{i}.qkv.weight"] = draw(3 * HEADS * HEAD, WIDTH).bfloat16()
        values[f"blocks.{i}.out.weight"] = draw(WIDTH, HEADS * HEAD).bfloat16()
        values[f"tables.{i}.weight"] = draw(TABLE_FEATURES[i], WIDTH).bfloat16()
    for i in range(2):
        values[f"blocks.{i}.out.bias"] = draw(WIDTH)
    return values


def save(file: Path, values: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file with the tensors in the given order (the library would sort them to be aligned)."""
    header, data = {}, b""
    for key, tensor in values.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(file: Path) -> dict[str, Stored]:
    """The stored tensors of a file."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    found = {}
    for key, entry in json.loads(data[8 : 8 + length]).items():
        start, stop = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), dtypes[entry["dtype"]]
        found[key] = Stored(shape, dtype, key, file, 8 + length + start, stop - start)
    return found


def graphs(checkpoint: SmallCheckpoint, profile: Profile, partition: str, weights: Path) -> tuple[Graph, ...]:
    """The two graphs, with two instances each."""
    stored = checkpoint.stored("denoiser", partition)
    blocks: tuple[Mapping[str, Weight], ...] = tuple(
        {name: stored[f"blocks.{i}.{name}"] for name in ("qkv.weight", "out.weight", "out.bias")} for i in range(2)
    )
    attend = Graph(
        "attend",
        Attend,
        (TensorSpec("hidden", torch.float32, (ROWS, WIDTH)),),
        (TensorSpec("mixed", torch.float32, (ROWS, WIDTH)),),
        blocks,
        torch.float32,
        trials=({"rows": 5}, {"rows": 33}),
    )
    table = Graph(
        "table",
        Table,
        (
            TensorSpec("rows", torch.float32, (4, WIDTH)),
            TensorSpec("index", torch.int64, (STEPS,), below=4),
        ),
        (TensorSpec("features", torch.float32, (STEPS, FEATURES)),),
        tuple({"weight": stored[f"tables.{i}.weight"]} for i in range(2)),
        torch.float32,
        trials=({"steps": 4}, {"steps": 6}),
        weight_axes={"weight": (FEATURES, WIDTH)},
    )
    return attend, table


def expected(checkpoint: SmallCheckpoint, partition: str, instance: int, hidden: torch.Tensor) -> torch.Tensor:
    """`attend` in float64 torch, on weights read by plain file access."""
    weight = {key: value(stored).double() for key, stored in checkpoint.stored("denoiser", partition).items()}
    prefix = f"blocks.{instance}."
    qkv = hidden.double() @ weight[f"{prefix}qkv.weight"].T
    query, key, rows = (x.reshape(-1, HEADS, HEAD).transpose(0, 1) for x in qkv.split(HEADS * HEAD, dim=-1))
    mixed = torch.softmax(query @ key.transpose(1, 2) / HEAD**0.5, dim=-1) @ rows
    joined = mixed.transpose(0, 1).reshape(-1, HEADS * HEAD)
    return hidden.double() + joined @ weight[f"{prefix}out.weight"].T + weight[f"{prefix}out.bias"]


def value(stored: Stored) -> torch.Tensor:
    """A stored tensor, read by plain file access."""
    raw = stored.file.read_bytes()[stored.offset : stored.offset + stored.nbytes]
    return torch.frombuffer(bytearray(raw), dtype=stored.dtype).reshape(stored.shape)


def dimensions() -> Dimensions:
    """Some sizes; the build only hands them on."""
    return Dimensions(
        denoiser=DenoiserDimensions(
            hidden=WIDTH, layers=2, refiner_layers=1, heads=HEADS, head_dim=HEAD, ffn=16, video_channels=24,
            audio_channels=32, patch=(1, 2, 2), text_dim=16, freq_dim=8, time_hidden=8, time_dim=4,
            rope_frequencies=1, rope_theta=1e4, norm_eps=1e-5, qk_norm_eps=1e-5, final_norm_eps=1e-5,
        ),
        text_encoder=TextEncoderDimensions(
            hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate=16, vocab=64, rope_theta=1e6,
            mrope_section=(2, 1, 1), rms_eps=1e-6,
        ),
        vision=VisionDimensions(
            depth=2, hidden=16, heads=2, intermediate=16, patch=16, temporal_patch=2, merge=2, position_grid=4,
            deepstack=(0,), out_hidden=16,
        ),
        processor=Processor(
            image_min_pixels=65536, image_max_pixels=16777216, video_min_pixels=4096, video_max_pixels=25165824,
            patch=16, temporal_patch=2, merge=2, mean=(0.5,) * 3, std=(0.5,) * 3, vision_start_id=60,
            vision_end_id=61, image_pad_id=62, video_pad_id=63,
        ),
        video_vae=VideoVAEDimensions(latent_channels=24, latents_mean=(0.0,) * 24, latents_std=(1.0,) * 24),
        audio_vae=AudioVAEDimensions(latent_channels=32, latents_mean=(0.0,) * 32, latents_std=(1.0,) * 32),
    )  # fmt: skip

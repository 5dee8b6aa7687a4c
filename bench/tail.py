"""The tail of a request, serial against overlapped: decoding, encoding and both at once, with the same bytes.

On the CPU: a source that yields a chunk every 60 ms, in processes of their own whose memory is measured, and the
miniature's engines. On a GPU: the released video decoder, with random weights.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import torch

from bench.report import write_table
from bench.requests import default_media
from bench.tail_run import CHUNK_SECONDS, FRAMES, HEIGHT, SIDES, WIDTH, Run, Source, tone
from engines.profile import Profile
from runtime.decode import decode_planes
from runtime.events import Cancellation, Reporter
from runtime.tail import CHUNKS, Chunk
from runtime.transfer import to_host

if TYPE_CHECKING:
    from runtime.pipeline import Pipeline

ROUNDS = 5

MINIATURE = {"aspect_ratio": "1:1", "width": 256, "height": 256, "duration": 4, "num_inference_steps": 1, "seed": 1}

Results = Mapping[str, Sequence[Mapping[str, Any]]]


def measure(folder: Path, profile: Profile, rounds: int = ROUNDS) -> dict[str, Any]:
    """All comparisons that a machine with this profile can make. Raises RuntimeError where the bytes differ."""
    sides = _gpu(folder, profile, rounds) if profile.on_gpu else _cpu(folder, rounds)
    return {
        "what": "the tail of a request, serial against overlapped, in turns",
        "host": _host(),
        "profile": profile.name,
        "chunks alive": CHUNKS,
        **sides,
    }


def write(measured: Mapping[str, Any], folder: Path, name: str) -> tuple[Path, ...]:
    """Writes `name`.json and .md; returns what was written."""
    return write_table(measured, table(measured), folder, name)


def table(measured: Mapping[str, Any]) -> str:
    """Seconds of each side, and what they mean, in Markdown."""
    host = measured["host"]
    where = f"{host.get('gpu', 'CPU')}, {host['cores']} cores, load {host['load average']:.1f}"
    lines = [f"{measured['what']}; {where}", "", f"| source | {' | '.join(_COLUMNS)} |", "| --- |" + " ---: |" * 8]
    for name, found in measured.items():
        if isinstance(found, Mapping) and "serial" in found:
            lines.append(f"| {name} | {' | '.join(_cells(found))} |")
    return "\n".join(lines) + "\n"


_COLUMNS = (
    "decode, s",
    "encode, s",
    "serial, s",
    "overlapped, s",
    "serial / overlapped",
    "overlapped / max(decode, encode)",
    "first fragment, s",
    "peak memory, MiB",
)


def _cells(found: Mapping[str, Any]) -> list[str]:
    peak = found.get("peak_memory_MiB")
    seconds = [found["serial"][key] for key in ("decode_s", "encode_s", "wall_s")]
    seconds += [found["overlapped"]["wall_s"], found["serial / overlapped"], found["overlapped / max(decode, encode)"]]
    seconds.append(found["fragmented"]["first_piece_s"])
    return [f"{value:.2f}" for value in seconds] + ["" if peak is None else f"{peak['overlapped']:.0f}"]


def _cpu(folder: Path, rounds: int) -> dict[str, Any]:
    return {
        f"synthetic source, {FRAMES} frames of {WIDTH}x{HEIGHT}": synthetic(rounds),
        "miniature engines, 107 frames of 256x256": miniature(folder, rounds),
    }


def _gpu(folder: Path, profile: Profile, rounds: int) -> dict[str, Any]:
    from bench import vae

    engines = vae.open_decoder(folder, profile)
    shape, latents = vae.clip_of(engines)

    def chunks() -> Generator[Chunk, None, None]:
        yield from map(to_host, vae.decoded(engines, latents))

    size = shape.width, shape.height
    found = _in_turns(chunks, shape.frames, size, rounds)
    return {
        f"video decoder, {shape.frames} frames of {shape.width}x{shape.height}": found,
        "note": "random weights: the picture is noise, slow to encode",
    }


def synthetic(rounds: int) -> dict[str, Any]:
    """Every run in a process of its own: what it took, and the most memory that it had."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in _SIDE}
    for _ in range(rounds):
        for name, (side, container) in _SIDE.items():
            runs[name].append(_child(side, container))
    found = _summary(runs)
    peak = {name: max(one["peak_memory_bytes"] for one in each) / 2**20 for name, each in runs.items()}
    return {"chunk every ms": 1e3 * CHUNK_SECONDS, **found, "peak_memory_MiB": peak}


def miniature(folder: Path, rounds: int) -> dict[str, Any]:
    """Engines of a miniature checkpoint on the CPU, built where they are not there yet."""
    from engines.build import build
    from export.miniature import write_miniature
    from runtime.pipeline import Pipeline

    checkpoint, store = folder / "checkpoint", folder / "engines"
    if not checkpoint.exists():
        write_miniature(checkpoint, "native", 0)
    build(checkpoint, "cpu", store)
    pipeline = Pipeline.open(store, stages=["decode"])
    resolved = pipeline.take("A fox", MINIATURE).resolved
    grid = resolved.latent_frames, resolved.latent_height, resolved.latent_width
    latents = torch.randn(1, 24, *grid, generator=torch.Generator().manual_seed(3))
    size = resolved.width, resolved.height
    return _in_turns(lambda: _decoded(pipeline, latents), resolved.frames, size, rounds)


def _decoded(pipeline: Pipeline, latents: torch.Tensor) -> Generator[Chunk, None, None]:
    vae = pipeline.manifest.dimensions.video_vae
    yield from map(
        to_host, decode_planes(latents, pipeline.decode_tile, vae, "bt709", Reporter.silent(), Cancellation())
    )


def _in_turns(source: Source, frames: int, size: tuple[int, int], rounds: int) -> dict[str, Any]:
    waveform = tone(frames)
    sides: Mapping[str, Callable[[], Run]] = {
        name: partial(SIDES[side], source, waveform, size, default_media(container))
        for name, (side, container) in _SIDE.items()
    }
    sides["serial"]()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            runs[name].append(run().as_json())
    return _summary(runs)


_SIDE = {
    "serial": ("serial", "faststart"),
    "overlapped": ("overlapped", "faststart"),
    "fragmented": ("overlapped", "fragmented"),
}
"""Side and container of each kind of run."""


def _child(side: str, container: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.tail_run", side, container]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _summary(runs: Results) -> dict[str, Any]:
    """Medians, and what they mean. Raises RuntimeError unless serial and overlapped gave the same bytes."""
    if _digests(runs["serial"]) != _digests(runs["overlapped"]) or len(_digests(runs["fragmented"])) != 1:
        raise RuntimeError("bytes differ between runs of the same frames")
    times = {name: {key: _median(each, key) for key in ("wall_s", "first_piece_s")} for name, each in runs.items()}
    parts = {key: _median(runs["serial"], key) for key in ("decode_s", "encode_s")}
    walls = [[one["wall_s"] for one in runs[name]] for name in ("serial", "overlapped")]
    longer = [max(one["decode_s"], one["encode_s"]) for one in runs["serial"]]
    return {
        "serial": {**times["serial"], **parts},
        "overlapped": times["overlapped"],
        "fragmented": times["fragmented"],
        "the same bytes": True,
        "mp4_bytes": runs["serial"][0]["mp4_bytes"],
        "sha256": runs["serial"][0]["sha256"],
        "serial / overlapped": statistics.median(a / b for a, b in zip(*walls, strict=True)),
        "overlapped / max(decode, encode)": statistics.median(b / c for b, c in zip(walls[1], longer, strict=True)),
        "rounds": {name: list(each) for name, each in runs.items()},
    }


def _digests(runs: Iterable[Mapping[str, Any]]) -> set[str]:
    return {one["sha256"] for one in runs}


def _median(runs: Iterable[Mapping[str, Any]], key: str) -> float:
    return statistics.median(one[key] for one in runs)


def _host() -> dict[str, Any]:
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        **gpu,
        "cores": os.cpu_count(),
        "load average": os.getloadavg()[0],
        "torch": str(torch.__version__),
        "pyav": av.__version__,
        "python": platform.python_version(),
    }

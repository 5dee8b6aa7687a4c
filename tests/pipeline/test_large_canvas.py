"""A canvas of many tiles and many rows, and what is refused: memory must not grow with the square of the rows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.events import Cancellation
from runtime.pipeline import Encoded, Pipeline
from runtime.refusal import RequestError
from runtime.request import resolve

BEGIN = """
import resource, sys, time
from runtime.decode import decode_video
from runtime.events import Cancellation, Reporter
from runtime.pipeline import Pipeline
from runtime.probe import inspect_mp4

pipeline = Pipeline.open(sys.argv[1])
shape = {"duration": 4, "aspect_ratio": "1:1", "width": 768, "height": 768, "num_inference_steps": 1}
taken, ignore, never = pipeline.take("A red fox", shape), lambda event: None, Cancellation()
"""
FIRST_CHUNK = """
((video, _),) = pipeline.denoise(taken.resolved, pipeline.encode(taken, ignore, never), ignore, never)
vae = pipeline.manifest.dimensions.video_vae
frames = next(decode_video(video, pipeline.decode_tile, vae, Reporter(ignore, time.monotonic), never))
assert frames.shape[1:] == (768, 768, 3)
"""
WHOLE = """
(clip,) = pipeline.generate(taken, ignore, never)
assert not inspect_mp4(clip).problems(768, 768, 107), inspect_mp4(clip).problems(768, 768, 107)
"""
END = "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [FIRST_CHUNK, pytest.param(WHOLE, marks=pytest.mark.soak)], ids=["first chunk", "whole"]
)
def test_768x768_runs_in_bounded_memory(store: Path, what: str) -> None:
    """18,788 rows in 16 tiles a chunk. Scores of one block would be 11.3 GB if attention materialised them."""
    command = [sys.executable, "-c", BEGIN + what + END, str(store)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr
    peak = int(result.stdout.split()[-1])
    assert peak < 3 << 30, f"{peak / 2**30:.2f} GiB"


def test_what_exceeds_memory_is_refused_with_the_largest_canvas_that_fits(store: Path) -> None:
    pipeline = Pipeline.open(store)
    shape = {"duration": 15, "aspect_ratio": "1:1", "width": 4096, "height": 4096}
    with pytest.raises(RequestError, match="4096x4096 for 15 s") as refusal:
        pipeline.take("A red fox", shape)
    largest = re.fullmatch(r"(\d+)x(\d+) for 15 s", refusal.value.nearest[0])
    assert largest, refusal.value.nearest
    side = int(largest[1])
    assert pipeline.take("A red fox", {**shape, "width": side, "height": side}).resolved.width == side
    with pytest.raises(RequestError):
        pipeline.take("A red fox", {**shape, "width": side + 32, "height": side + 32})


def test_a_stage_that_is_called_by_itself_admits_by_memory_too(store: Path) -> None:
    """Triton's stages answer any client: a resolved request need not have come through `resolve`."""
    pipeline = Pipeline.open(store)
    huge = resolve(
        "A red fox",
        {"duration": 15, "aspect_ratio": "1:1", "width": 4096, "height": 4096},
        pipeline.manifest.dimensions,
    )
    nothing = torch.zeros(0)
    text = Encoded(torch.zeros(4, 64), torch.ones(4, dtype=torch.int64), torch.zeros(0, 96), torch.zeros(0, 32))
    with pytest.raises(RequestError, match="4096x4096"):
        pipeline.denoise(huge, text, lambda event: None, Cancellation())
    with pytest.raises(RequestError, match="4096x4096"):
        pipeline.decode(huge, nothing, nothing, lambda event: None, Cancellation())

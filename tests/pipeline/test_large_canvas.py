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

GENERATE = """
import resource, sys
from runtime.events import Cancellation
from runtime.pipeline import Pipeline
from runtime.probe import inspect_mp4

pipeline = Pipeline.open(sys.argv[1])
shape = {"duration": 4, "aspect_ratio": "1:1", "width": 768, "height": 768, "num_inference_steps": 1}
(clip,) = pipeline.generate(pipeline.take("A red fox", shape), lambda event: None, Cancellation())
assert not inspect_mp4(clip).problems(768, 768, 107), inspect_mp4(clip).problems(768, 768, 107)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_768x768_runs_in_bounded_memory(store: Path) -> None:
    """18,788 rows in 16 tiles a chunk. Scores of one block would be 11.3 GB if attention materialised them."""
    result = subprocess.run(
        [sys.executable, "-c", GENERATE, str(store)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
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

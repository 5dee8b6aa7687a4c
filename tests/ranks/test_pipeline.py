"""A request on ranks that each open the pipeline and make the same calls, against one process that serves alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.profile import Ranks
from engines.store import StoreError
from h3trt.verify_requests import picture
from runtime.decode import decode_video
from runtime.events import Cancellation, Cancelled, Event, Reporter, Units
from runtime.intake import Taken
from runtime.peers import PeerFailed, Peers
from runtime.pipeline import Encoded, Latents, Pipeline, Progress
from runtime.probe import inspect_mp4
from runtime.refusal import RequestError
from tests.ranks.spawn import run_ranks
from tests.ranks.stores import ranked_store

SMALLEST: dict[str, Any] = {"duration": 4, "width": 256, "height": 256, "num_inference_steps": 2, "seed": 7}
SQUARE = {**SMALLEST, "aspect_ratio": "1:1"}
PROMPT = "A red fox runs over fresh snow"
RANKS = Ranks(ulysses=2, text_encoder=2, video_tiles=2)
FOUR = Ranks(ulysses=4, text_encoder=1, video_tiles=1)

LAYER = 5
"""Units of an encoding up to one in the text encoder's layers."""


def request(pipeline: Pipeline, image: bytes) -> Taken:
    """Two outputs that begin with a picture."""
    return pipeline.take(PROMPT, {**SMALLEST, "num_outputs_per_prompt": 2}, {"image": [image]})


def ignore(event: Event) -> None:
    """No progress is looked at."""


def clips(pipeline: Pipeline, taken: Taken, events: list[Event]) -> tuple[Encoded, list[Latents]]:
    encoded = pipeline.encode(taken, events.append, Cancellation())
    return encoded, list(pipeline.denoise(taken.resolved, encoded, events.append, Cancellation()))


def serve(rank: int, size: int, store: str, image: str) -> dict[str, torch.Tensor]:
    """Requests on two ranks that share every stage, and on a third that has no part in any."""
    peers = Peers.join(RANKS)
    pipeline = Pipeline.open(store, peers=peers)
    taken = request(pipeline, Path(image).read_bytes())
    stopped = _stopped(pipeline, taken, peers)
    _refused(pipeline, taken, peers)
    events: list[Event] = []
    encoded, outputs = clips(pipeline, taken, events)
    found = {"text": encoded.text, "condition": encoded.condition_video} | stopped
    for index, (video, audio) in enumerate(outputs):
        found |= {f"video {index}": video, f"audio {index}": audio}
    clip = pipeline.decode(taken.resolved, *outputs[0], events.append, Cancellation())
    found["clip"] = torch.from_numpy(np.frombuffer(clip, dtype=np.uint8).copy())
    if peers.rows is not None:
        units = Units("denoise", taken.resolved.forwards, Reporter.silent(), Cancellation())
        for step, state in enumerate(next(pipeline.trajectory(taken.resolved, encoded, units))):
            found[f"state {step}"] = torch.cat([state.video.flatten(), state.audio.flatten()])
    return found


class Watch:
    """Progress that asks the request to stop, once so many units are done."""

    def __init__(self, after: int | None) -> None:
        self.cancellation, self.index, self._after = Cancellation(), 0, after

    def __call__(self, event: Event) -> None:
        self.index = event.index
        if event.index == self._after:
            self.cancellation.cancel()


def _stopped(pipeline: Pipeline, taken: Taken, peers: Peers) -> dict[str, torch.Tensor]:
    """The units that were done of a stage that rank 0 is asked to stop in."""
    found, encoded = {}, pipeline.encode(taken, ignore, Cancellation())

    def encode(progress: Progress, cancellation: Cancellation) -> None:
        pipeline.encode(taken, progress, cancellation)

    def denoise(progress: Progress, cancellation: Cancellation) -> None:
        list(pipeline.denoise(taken.resolved, encoded, progress, cancellation))

    for stage, run, after in (("encode", encode, LAYER), ("denoise", denoise, 1)):
        watch = Watch(after if peers.first else None)
        with pytest.raises(Cancelled):
            run(watch, watch.cancellation)
        found[f"stopped in {stage}"] = torch.tensor([watch.index])
    return found


def _refused(pipeline: Pipeline, taken: Taken, peers: Peers) -> None:
    """What only rank 0 can know is wrong is raised there as what it is, and all go on."""
    error = RequestError if peers.first else PeerFailed
    broken = dataclasses.replace(taken, media=(taken.media[0][: len(taken.media[0]) // 2],))
    with pytest.raises(error, match="truncated"):
        pipeline.encode(broken, ignore, Cancellation())
    memory = pipeline._intake._memory
    if peers.first:
        pipeline._intake._memory = dataclasses.replace(memory, budget=1 << 20)
    with pytest.raises(error, match="of memory"):
        pipeline.decode(taken.resolved, torch.zeros(0), torch.zeros(0), ignore, Cancellation())
    pipeline._intake._memory = memory


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("image") / "first.png"
    file.write_bytes(picture(256, 256, seed=3))
    return file


def test_a_request_of_ranks_is_the_request_of_one(
    store: Path, session_folder: Path, tmp_path: Path, image: Path
) -> None:
    ranks = run_ranks(serve, 3, tmp_path, str(ranked_store(store, session_folder, **dict(RANKS))), str(image))
    pipeline = Pipeline.open(store)
    taken = request(pipeline, image.read_bytes())
    encoded, outputs = clips(pipeline, taken, [])
    first, other, _ = ranks
    for index, output in enumerate(outputs):
        for name, expected in zip(("video", "audio"), output, strict=True):
            assert all(torch.equal(found[f"{name} {index}"], first[f"{name} {index}"]) for found in ranks)
            # The sums are the same, in another order; those of all layers of the text encoder among them.
            assert (first[f"{name} {index}"] - expected).abs().max() < 1e-4
    for found in ranks:
        assert torch.equal(found["text"], first["text"])
        assert (found["text"] - encoded.text).abs().max() <= 1e-5 * encoded.text.abs().max()
        assert torch.equal(found["condition"], encoded.condition_video)
    states = [name for name in first if name.startswith("state")]
    assert len(states) == 1 + SMALLEST["num_inference_steps"]
    assert all(torch.equal(first[name], other[name]) for name in states)
    assert psnr(frames(pipeline, first["video 0"]), frames(pipeline, outputs[0][0])) >= 60
    resolved = taken.resolved
    assert inspect_mp4(first["clip"].numpy().tobytes()).problems(256, 256, resolved.frames) == []
    assert not len(other["clip"])
    # None began a unit after the one at which rank 0 was asked to stop. The third rank has none.
    assert [found["stopped in denoise"].item() for found in ranks] == [1, 1, 0]
    assert [found["stopped in encode"].item() for found in ranks] == [LAYER, LAYER, 0]


def serve_rows(rank: int, size: int, store: str) -> dict[str, torch.Tensor]:
    """A request on ranks that share its rows alone."""
    pipeline = Pipeline.open(store, stages=("encode", "denoise"), peers=Peers.join(FOUR))
    ((video, audio),) = clips(pipeline, pipeline.take(PROMPT, SQUARE), [])[1]
    return {"video": video, "audio": audio}


def test_a_request_of_four_ranks_is_the_request_of_one(store: Path, session_folder: Path, tmp_path: Path) -> None:
    ranked = ranked_store(store, session_folder, ulysses=FOUR.ulysses)
    first, *others = run_ranks(serve_rows, FOUR.ulysses, tmp_path, str(ranked))
    pipeline = Pipeline.open(store)
    ((video, audio),) = clips(pipeline, pipeline.take(PROMPT, SQUARE), [])[1]
    assert all(torch.equal(found[name], first[name]) for found in others for name in first)
    assert (first["video"] - video).abs().max() < 1e-4
    assert (first["audio"] - audio).abs().max() < 1e-4
    assert psnr(frames(pipeline, first["video"]), frames(pipeline, video)) >= 60


def frames(pipeline: Pipeline, video: torch.Tensor) -> torch.Tensor:
    made = decode_video(
        video, pipeline.decode_tile, pipeline.manifest.dimensions.video_vae, Reporter.silent(), Cancellation()
    )
    return torch.cat(list(made))


def psnr(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    error = (ours.double() - theirs.double()).square().mean().item()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def test_a_store_of_ranks_is_not_served_by_one(store: Path, session_folder: Path) -> None:
    ranked = ranked_store(store, session_folder, **dict(RANKS))
    with pytest.raises(StoreError, match=r"ranks\.ulysses = 2, and 1 are here"):
        Pipeline.open(ranked, stages=("denoise",))
    with pytest.raises(StoreError, match=r"ranks\.text_encoder = 1, and 2 are here"):
        Pipeline.open(store, stages=("encode",), peers=Peers(RANKS))

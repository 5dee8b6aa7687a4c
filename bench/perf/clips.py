"""Clips that are made before anything is measured: they warm the server, and show that what is timed is right."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import urllib3

from bench.perf.workload import Workload
from runtime.probe import inspect_mp4
from triton_repo.client import Client

Make = Callable[[str, Mapping[str, Any]], tuple[bytes, Mapping[str, Any]]]
"""Prompt and parameters to the MP4 and the request as it was resolved."""

Progress = Callable[[str], None]

SECONDS = 3600.0
"""What a gateway may take for a clip."""


class ClipError(RuntimeError):
    """A clip is not what was asked for, so that its time says nothing."""


@dataclass(frozen=True)
class Checked:
    """A clip that was looked at: its size, and seconds of its longer track."""

    width: int
    height: int
    frames: int
    clip: float


def warm(workload: Workload, make: Make, progress: Progress) -> Mapping[int, Checked]:
    """Makes a clip of each duration, the longest first, and looks at it; by duration.

    Raises:
        ClipError: one is not as its request was resolved, or the gateway refuses it.
        ClientError: the server refuses it.
    """
    found = {}
    for seconds in sorted(set(workload.seconds), reverse=True):
        progress(f"warm-up: {seconds} s")
        found[seconds] = _checked(*make(workload.prompt, workload.params(seconds)))
    return found


def over_grpc(url: str) -> Make:
    """Clips of the ensemble at host:port."""

    def make(prompt: str, params: Mapping[str, Any]) -> tuple[bytes, Mapping[str, Any]]:
        with Client(url) as client:
            made = client.generate_unary(prompt, params)
        return made.mp4, made.resolved

    return make


def over_http(url: str) -> Make:
    """Clips of the gateway at http://host:port."""

    def post(route: str, body: Mapping[str, Any]) -> bytes:
        try:
            answer = urllib3.request(
                "POST", f"{url.rstrip('/')}/v1/videos/{route}", json=body, retries=False, timeout=SECONDS
            )
        except urllib3.exceptions.HTTPError as error:
            raise ClipError(f"no gateway answers at {url}: {error}; start one with: h3trt gateway") from None
        if answer.status != 200:
            raise ClipError(f"{url} answers {answer.status}: {answer.data[:500].decode(errors='replace')}")
        return answer.data

    def make(prompt: str, params: Mapping[str, Any]) -> tuple[bytes, Mapping[str, Any]]:
        body = {**params, "prompt": prompt}
        return post("sync", body), json.loads(post("dry-run", body))

    return make


def _checked(mp4: bytes, resolved: Mapping[str, Any]) -> Checked:
    width, height, frames = (resolved[name] for name in ("width", "height", "frames"))
    report = inspect_mp4(mp4)
    if problems := report.problems(width, height, frames):
        raise ClipError(f"a clip of {frames} frames is not as requested: " + "; ".join(problems))
    return Checked(width, height, frames, max(report.video.seconds, report.audio.samples / report.audio.sample_rate))

"""Serves the real models with 64 MiB of /dev/shm, as a container has by default; prints what requests then get.

A program, for it must run in a mount namespace of its own, with the store and a folder to work in as its arguments.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from tests.media.clips import picture, saved
from triton_repo.client import Client, ClientError
from triton_repo.names import PUBLIC_MODELS
from triton_repo.repository import RepositorySettings, render
from triton_repo.server import ServerSettings, TritonServer
from triton_repo.shared_memory import ROOT

QUICK = {"width": 256, "height": 256, "duration": 4, "num_inference_steps": 1, "seed": 5, "aspect_ratio": "1:1"}
LARGE = {**QUICK, "task": "ref2va", "reference_short_edge": 256}
SHARE = 21 << 20
"""Bytes of each of three images, which together fit into a request and not into the memory."""


def main(store: Path, folder: Path) -> None:
    """Print one JSON object."""
    render(store, folder / "repository", RepositorySettings())
    settings = ServerSettings(folder / "repository", folder / "server.log", PUBLIC_MODELS)
    image = saved(picture(), "JPEG")
    files = [image + bytes(SHARE - len(image))] * 3
    with TritonServer(settings) as server, Client(server.endpoints.grpc) as client:
        found = {
            "before": _clip(client, "generate"),
            "unary": _clip(client, "generate_unary"),
            "too large for the stream": _refusal(client, "generate", files),
            "too large for the ensemble": _refusal(client, "generate_unary", files),
            "after": _clip(client, "generate"),
        }
    print(json.dumps(found | {"left": [path.name for path in ROOT.iterdir()]}))  # noqa: T201


def _clip(client: Client, call: str) -> str:
    return hashlib.sha256(getattr(client, call)("A fox.", QUICK).mp4).hexdigest()


def _refusal(client: Client, call: str, files: list[bytes]) -> Any:
    try:
        getattr(client, call)("A fox.", LARGE, files={"image": files})
    except ClientError as error:
        return error.failure.value, str(error)
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""A gateway in a process of its own before a toy server, and what it is asked."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx2

from tests.conftest import H3TRT

RESOLVED = {
    "task": "t2va",
    "width": 256,
    "height": 256,
    "frames": 107,
    "fps": 24,
    "seconds": 4.458,
    "forwards": 1,
    "sigma_points": 2,
    "seed": 1,
    "quality": {"tier": "lossless"},
    "notes": [],
}
"""What the toy's h3_prepare does not make up by itself."""


class GatewayProcess:
    """`h3trt gateway` on a free port; use it as a context manager, which kills it."""

    def __init__(self, triton: str, folder: Path, *options: str) -> None:
        command = [*H3TRT, "gateway", "--triton", triton, "--port", "0", "--folder", str(folder), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("gateway "), self.process.communicate()
        self.url = line.split()[1]
        self.client = httpx2.Client(base_url=self.url, timeout=60)

    def __enter__(self) -> GatewayProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()

    def submit(self, headers: dict[str, str] | None = None, **params: Any) -> str:
        """The id of a job that must be accepted. params: what the toy is to do."""
        answer = self.post(headers, **params)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def post(self, headers: dict[str, str] | None = None, **params: Any) -> httpx2.Response:
        """The answer to a request for a job."""
        return self.client.post("/v1/videos", json={"prompt": "p", **RESOLVED, **params}, headers=headers or {})

    def job(self, job_id: str) -> dict[str, Any]:
        """Its record."""
        return self.client.get(f"/v1/videos/{job_id}").json()

    def content(self, job_id: str) -> httpx2.Response:
        """Its clip."""
        return self.client.get(f"/v1/videos/{job_id}/content")

    def wait(self, job_id: str, *statuses: str) -> dict[str, Any]:
        """The record once the job has one of these statuses; unless told otherwise, once it has ended."""
        wanted = statuses or ("completed", "failed")
        while (job := self.job(job_id))["status"] not in wanted:
            time.sleep(0.05)
        return job

    def stop(self) -> tuple[int, str]:
        """SIGTERM, and its end: the exit code and what it said."""
        self.process.send_signal(signal.SIGTERM)
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output + errors


def events(text: str) -> list[dict[str, Any]]:
    """The data of server-sent events."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]

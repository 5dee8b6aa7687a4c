"""A stand-in for the server: it does what a test says, at the moment that the test says, which a real one cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from gateway.models import Asked, Message
from runtime.request import resolve
from tests.request.sizes import RELEASED as DIMENSIONS
from triton_repo.messages import ClientError, Failure

PARAMS = {"aspect_ratio": "1:1", "width": 256, "height": 256, "duration": 4, "num_inference_steps": 3}
MP4 = b"mp4 of output "


class Run:
    """One generation: it makes steps when it is let, and keeps what became of it."""

    def __init__(self, asked: Asked, request_id: str) -> None:
        self.asked, self.request_id = asked, request_id
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()
        self.steps: asyncio.Queue[Exception | None] = asyncio.Queue()

    def step(self, error: Exception | None = None) -> None:
        """Lets it make one step, or fail."""
        self.steps.put_nowait(error)


class ScriptedModels:
    """Models that need no server.

    free: generations run to their end without being let. fragmented: clips come in two pieces, the second of them when
    one more step is let. estimate: what the server says of a request.
    """

    def __init__(self, free: bool = True, fragmented: bool = False, estimate: Mapping[str, Any] | None = None) -> None:
        self.free, self.fragmented, self.estimate = free, fragmented, estimate
        self.runs: list[Run] = []
        self.is_ready = True
        self.refusals: list[ClientError] = []

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def ready(self) -> bool:
        return self.is_ready

    async def resolve(self, asked: Asked, seconds: float, request_id: str) -> Mapping[str, Any]:
        try:
            resolved = resolve(asked.prompt, asked.params, DIMENSIONS).model_dump(mode="json")
        except ValueError as error:
            raise ClientError(Failure.INVALID, str(error)) from None
        if self.fragmented:
            resolved["media"]["container"] = "fragmented"
        return resolved | {"estimate": self.estimate}

    async def generate(self, asked: Asked, resolved: Mapping[str, Any], request_id: str) -> AsyncIterator[Message]:
        if self.refusals:
            raise self.refusals.pop(0)
        run = Run(asked, request_id)
        self.runs.append(run)
        ended = False
        try:
            forwards = asked.params["num_inference_steps"]
            yield Message(_event("encode", 1, 1, 0.1))
            run.begun.set()
            for step in range(forwards):
                error = None if self.free else await run.steps.get()
                if error is not None:
                    raise error
                yield Message(_event("denoise", step + 1, forwards, 1.0 + step))
            for index in range(asked.params.get("num_outputs_per_prompt", 1)):
                yield Message(_event("decode", 1, 1, 10.0 + index))
                if not self.fragmented:
                    yield Message(index=index, piece=MP4 + str(index).encode())
                    continue
                yield Message(index=index, piece=MP4)
                if not self.free and (error := await run.steps.get()) is not None:
                    raise error
                yield Message(index=index, piece=str(index).encode())
            ended = True
        finally:
            if not ended:
                run.cancelled.set()

    async def begun(self, count: int = 1) -> Run:
        """The run of that number, once it works."""
        while len(self.runs) < count:
            await asyncio.sleep(0.005)
        await self.runs[count - 1].begun.wait()
        return self.runs[count - 1]


def _event(stage: str, index: int, total: int, seconds: float) -> Mapping[str, Any]:
    return {"stage": stage, "index": index, "total": total, "seconds": seconds}

"""The routes of `/v1/videos`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel
from starlette.convertors import Convertor, register_url_convertor

from gateway.active import Active
from gateway.archive import zipped
from gateway.body import read_asked
from gateway.clips import Clips
from gateway.errors import ApiError, Code
from gateway.following import following
from gateway.job import JOB_ID, MEDIA_TYPE, VideoJob
from gateway.jobs import Jobs
from gateway.metrics import GatewayMetrics
from gateway.models import Asked
from gateway.progress import LAST_ID
from gateway.schema import REQUEST_BODY, answers
from gateway.settings import UPLOADS, GatewaySettings

KEY_PATTERN = r"^[\x21-\x7e]{1,255}$"
PAGE_MAXIMUM = 100
RETRY_MILLISECONDS = 1000
PING_SECONDS = 15.0


class _JobId(Convertor[str]):
    """The only ids that routes match: everything else under /v1/videos leads nowhere."""

    regex = JOB_ID.pattern

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


JobId = Annotated[str, Path(pattern=f"^{JOB_ID.pattern}$", description="the id of a job")]
IdempotencyKey = Annotated[
    str | None,
    Header(pattern=KEY_PATTERN, description="the same key with the same request is one job, however often it is sent"),
]


class JobList(BaseModel):
    """A page of jobs."""

    object: Literal["list"] = "list"
    data: list[VideoJob]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """What a deletion answers."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class Videos:
    """The handlers, which share the jobs, the clips and a limit on bodies that are read at once."""

    def __init__(self, jobs: Jobs, clips: Clips, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._jobs, self._clips, self._settings, self._metrics = jobs, clips, settings, metrics
        self._uploads = asyncio.Semaphore(UPLOADS)

    def add_to(self, app: FastAPI) -> None:
        """Adds all routes."""
        register_url_convertor("job_id", _JobId())
        body: dict[str, Any] = {"openapi_extra": REQUEST_BODY}
        one = "/{job_id:job_id}"
        for path, method, handler, options in (
            ("", "POST", self.create, {"response_model": VideoJob, **body}),
            ("", "GET", self.list_jobs, {"response_model": JobList}),
            ("/sync", "POST", self.create_and_wait, {"response_class": FileResponse, **body}),
            ("/dry-run", "POST", self.dry_run, {"response_model": dict[str, Any], **body}),
            (one, "GET", self.job, {"response_model": VideoJob}),
            (one, "DELETE", self.delete, {"response_model": Deleted}),
            (f"{one}/content", "GET", self.content, {"response_class": FileResponse}),
            (f"{one}/events", "GET", self.events, {"response_class": StreamingResponse}),
        ):
            name = handler.__name__
            app.add_api_route(
                f"/v1/videos{path}", handler, methods=[method], responses=answers(name), operation_id=name, **options
            )

    async def create(self, request: Request, idempotency_key: IdempotencyKey = None) -> VideoJob:
        """Accept a request as a job. The body may also be JSON: the parameters object of the request page."""
        return await self._submitted(request, idempotency_key)

    async def dry_run(self, request: Request) -> Mapping[str, Any]:
        """Say what a request would become, with every default and derived size; nothing is generated."""
        return await self._jobs.dry_run(await self._read(request))

    async def create_and_wait(self, request: Request, idempotency_key: IdempotencyKey = None) -> Response:
        """Make a clip and answer with it; of several outputs with a ZIP. Closing the connection cancels.

        A fragmented clip of one output is sent while it is made.
        """
        job = await self._submitted(request, idempotency_key, attached=True)
        if (active := self._jobs.active(job.id)) is not None:
            streamed = active.streamed and job.outputs == 1
            async with AsyncExitStack() as waiting:
                await waiting.enter_async_context(self._jobs.waiting_for(active))
                moment = active.beyond(0, 0) if streamed else active.ended.wait()
                if await self._reached(request, active, moment) and not active.ended.is_set():
                    return self._streamed(active, 0, waiting.pop_all())
            await active.ended.wait()
            job = active.job
        if job.error is not None:
            raise ApiError(job.error.code, job.error.message)
        return await self._clip(job, 0, archive=job.outputs > 1, headers=_sync_headers(job))

    async def list_jobs(
        self,
        request: Request,
        after: Annotated[str | None, Query(pattern=f"^{JOB_ID.pattern}$", description="a job, excluded")] = None,
        limit: Annotated[int, Query(ge=0, le=PAGE_MAXIMUM)] = 20,
        order: Annotated[Literal["asc", "desc"], Query(description="by acceptance")] = "desc",
    ) -> JobList:
        """The jobs that there are."""
        jobs, more = await self._jobs.page(request.state.owner, after, limit, order == "asc")
        ids = [job.id for job in jobs]
        return JobList(data=jobs, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=more)

    async def job(self, request: Request, job_id: JobId, response: Response) -> VideoJob:
        """A job's record; that of a failed job comes with the status of its error."""
        job = await self._jobs.get(job_id, request.state.owner)
        if job.error is not None:
            response.status_code = job.error.code.status
        return job

    async def delete(self, request: Request, job_id: JobId) -> Deleted:
        """Remove a job and its clips; one that has not ended is cancelled, which takes at most one step."""
        await self._jobs.delete(job_id, request.state.owner)
        return Deleted(id=job_id)

    async def content(
        self,
        request: Request,
        job_id: JobId,
        index: Annotated[int, Query(ge=0, le=9, description="which output")] = 0,
        archive: Annotated[Literal["zip"] | None, Query(description="all outputs in one ZIP")] = None,
    ) -> Response:
        """The finished MP4; Range requests are answered with the parts they ask for.

        A fragmented one is sent from its beginning while it is made.
        """
        job = await self._jobs.get(job_id, request.state.owner)
        active = self._jobs.active(job_id)
        if active is not None and active.streamed and archive is None and index < job.outputs:
            if await active.beyond(index, 0) and not active.ended.is_set():
                return self._streamed(active, index, AsyncExitStack())
            job = active.job
        if job.error is not None:
            raise ApiError(Code.JOB_FAILED, f"{job_id} failed with {job.error.code}: {job.error.message}")
        if job.status != "completed":
            raise ApiError(Code.NOT_FOUND, f"{job_id} is {job.status}; its clip is not there yet", "id")
        if index >= job.outputs:
            raise ApiError(Code.NOT_FOUND, f"index: got {index}; the job has {job.outputs} output(s)", "index")
        return await self._clip(job, index, archive == "zip", {})

    async def events(
        self,
        request: Request,
        job_id: JobId,
        last_event_id: Annotated[str | None, Header(pattern=rf"^([0-9]{{1,9}}|{LAST_ID})?$")] = None,
    ) -> Response:
        """The job's progress as server-sent events; `Last-Event-ID` continues where a broken stream ended.

        Events `progress` say stage, index, total, seconds and the percentage; events `status` carry the record, the
        last of them as it ended.
        """
        job = await self._jobs.get(job_id, request.state.owner)
        if last_event_id == LAST_ID:
            return Response(status_code=204)  # which is what keeps a browser from connecting again
        stream = self._follow(job, self._jobs.active(job_id), int(last_event_id or 0))
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _follow(self, job: VideoJob, active: Active | None, after: int) -> AsyncIterator[bytes]:
        yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
        if active is None:
            yield f"id: {LAST_ID}\nevent: status\ndata: {json.dumps(job.model_dump(mode='json'))}\n\n".encode()
            return
        events = active.log.follow(after)
        waiting: asyncio.Future[Any] | None = None
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(anext(events, None))
                done, _ = await asyncio.wait({waiting}, timeout=PING_SECONDS)
                if not done:
                    yield b": still there\n\n"  # or a proxy would end a connection that says nothing
                    continue
                event, waiting = waiting.result(), None
                if event is None:
                    return
                yield event.encode()
        finally:
            if waiting is not None:
                waiting.cancel()

    def _streamed(self, active: Active, index: int, waiting: AsyncExitStack) -> Response:
        """An output while it is made. waiting: what to leave when that is over."""

        async def pieces() -> AsyncIterator[bytes]:
            async with waiting:
                async for piece in following(self._clips, active, index):
                    yield piece

        known = {"X-Request-Id": active.job.id, "X-Model": active.job.model}
        return StreamingResponse(pieces(), media_type=MEDIA_TYPE, headers=known)

    async def _submitted(self, request: Request, key: str | None, attached: bool = False) -> VideoJob:
        """The job that a request is accepted as. Raises ApiError."""
        try:
            return await self._jobs.submit(await self._read(request), request.state.owner, key, attached)
        except ApiError as error:
            self._metrics.refused.labels(error.code).inc()
            raise

    async def _read(self, request: Request) -> Asked:
        """The request in a body. Raises ApiError, also when too many bodies are being read."""
        if self._uploads.locked():
            raise ApiError(Code.QUEUE_FULL, "too many bodies are being read", retry_after=1)
        async with self._uploads:
            return await read_asked(request)

    async def _reached(self, request: Request, active: Active, moment: Coroutine[Any, Any, Any]) -> bool:
        """Waits for a moment of a job; False when its client went away before, or it took too long, which ends it.

        Raises ApiError when it took too long and the job is not this client's alone.
        """
        seconds = self._settings.sync_seconds
        gone, reached = asyncio.ensure_future(_gone(request)), asyncio.ensure_future(moment)
        try:
            await asyncio.wait({gone, reached}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done() and not reached.done():
                text = f"the clip was not ready after {seconds:g} s; POST /v1/videos makes it without waiting"
                if not active.attached:
                    raise ApiError(Code.TIMEOUT, text)
                self._jobs.stop(active, Code.TIMEOUT, text)
            return reached.done()
        finally:
            gone.cancel()
            reached.cancel()

    async def _clip(self, job: VideoJob, index: int, archive: bool, headers: Mapping[str, str]) -> Response:
        paths = [self._clips.path(job.id, output) for output in range(job.outputs)]
        if archive:
            named = {**headers, "Content-Disposition": f'attachment; filename="{job.id}.zip"'}
            return StreamingResponse(zipped(paths), media_type="application/zip", headers=named)
        try:
            stat = await asyncio.to_thread(paths[index].stat)
        except FileNotFoundError:
            raise ApiError(Code.NOT_FOUND, f"the clip of {job.id} has been removed", "id") from None
        name = job.file_name if job.outputs == 1 else f"{job.id}-{index}.mp4"
        return FileResponse(
            paths[index],
            headers=headers,
            media_type=MEDIA_TYPE,
            filename=name,
            stat_result=stat,
            content_disposition_type="inline",
        )


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sync_headers(job: VideoJob) -> dict[str, str]:
    known = {
        "X-Request-Id": job.id,
        "X-Model": job.model,
        "X-Inference-Time-S": job.inference_time_s,
        "X-Stage-Durations": json.dumps(job.stage_durations),
    }
    return {name: str(value) for name, value in known.items() if value is not None}

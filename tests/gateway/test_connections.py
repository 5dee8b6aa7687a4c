"""What a client has of a job while it stays connected: pieces as they are made, an end when it leaves."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.following import BrokenOff
from tests.gateway.conftest import Connection, Start
from tests.gateway.scripted import MP4, PARAMS, ScriptedModels
from triton_repo.messages import ClientError, Failure

pytestmark = pytest.mark.anyio

BODY = json.dumps({"prompt": "a fox", **PARAMS}).encode()
KIND = {"Content-Type": "application/json"}


async def test_a_client_that_leaves_a_synchronous_call_cancels_the_job(start: Start) -> None:
    async with start(ScriptedModels(free=False)) as one:
        call = Connection(one, "POST", "/v1/videos/sync", BODY)
        run = await one.models.begun()
        call.close()
        await asyncio.wait_for(run.cancelled.wait(), 5)
        job = await one.ended(run.request_id)
        assert job["error"]["code"] == "cancelled"


async def test_one_of_two_clients_that_wait_for_a_job_may_leave(start: Start) -> None:
    async with start(ScriptedModels(free=False)) as one:
        headers = {**KIND, "Idempotency-Key": "k"}
        staying = asyncio.create_task(one.client.post("/v1/videos/sync", content=BODY, headers=headers))
        run = await one.models.begun()
        active = one.gateway.jobs.active(run.request_id)
        assert active is not None
        async with one.gateway.jobs.waiting_for(active):
            assert active.waiters == 2
        for _ in range(3):
            run.step()
        assert (await staying).status_code == 200


async def test_a_client_that_stops_following_an_accepted_job_changes_nothing(start: Start) -> None:
    async with start(ScriptedModels(free=False)) as one:
        job = await one.post(PARAMS)
        run = await one.models.begun()
        following = Connection(one, "GET", f"/v1/videos/{job['id']}/events")
        await following.status()
        following.close()
        await asyncio.wait_for(following.task, 5)
        for _ in range(3):
            run.step()
        assert (await one.ended(job["id"]))["status"] == "completed"


@pytest.mark.parametrize("way", ["sync", "content"])
async def test_a_fragmented_clip_is_sent_while_it_is_made(start: Start, way: str) -> None:
    async with start(ScriptedModels(free=False, fragmented=True)) as one:
        if way == "sync":
            call = Connection(one, "POST", "/v1/videos/sync", BODY)
        else:
            job = await one.post(PARAMS)
            call = Connection(one, "GET", f"/v1/videos/{job['id']}/content")
        run = await one.models.begun()
        for _ in range(3):
            run.step()
        assert await asyncio.wait_for(call.status(), 5) == 200
        assert await asyncio.wait_for(call.piece(), 5) == MP4
        assert one.gateway.jobs.active(run.request_id) is not None
        run.step()
        assert await asyncio.wait_for(call.piece(), 5) == b"0"
        assert await asyncio.wait_for(call.piece(), 5) == b""
        assert (await one.client.get(f"/v1/videos/{run.request_id}/content")).content == MP4 + b"0"


async def test_a_clip_that_breaks_off_does_not_end_as_if_it_were_whole(start: Start) -> None:
    async with start(ScriptedModels(free=False, fragmented=True)) as one:
        call = Connection(one, "POST", "/v1/videos/sync", BODY)
        run = await one.models.begun()
        for _ in range(3):
            run.step()
        assert (await call.status(), await call.piece()) == (200, MP4)
        run.step(ClientError(Failure.UNAVAILABLE, "no server answers"))
        with pytest.raises(BrokenOff, match="no server answers"):
            await asyncio.wait_for(call.task, 5)


async def test_a_fragmented_clip_that_fails_before_it_begins_is_an_error(start: Start) -> None:
    async with start(ScriptedModels(free=False, fragmented=True)) as one:
        call = asyncio.create_task(one.client.post("/v1/videos/sync", content=BODY, headers=KIND))
        (await one.models.begun()).step(ClientError(Failure.UNAVAILABLE, "no server answers"))
        assert (await call).status_code == 503


async def test_leaving_a_fragmented_clip_cancels_it(start: Start) -> None:
    async with start(ScriptedModels(free=False, fragmented=True)) as one:
        call = Connection(one, "POST", "/v1/videos/sync", BODY)
        run = await one.models.begun()
        for _ in range(3):
            run.step()
        assert (await call.status(), await call.piece()) == (200, MP4)
        call.close()
        await asyncio.wait_for(run.cancelled.wait(), 5)

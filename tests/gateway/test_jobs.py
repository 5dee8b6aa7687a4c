"""The life of a job: accepted, run, cancelled, kept, found again after a restart, or told why not."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import Code
from gateway.jobs import PATIENCE_SECONDS, RETRY_SECONDS
from gateway.store import JobStore
from tests.gateway.conftest import Connection, Start, TurnedClock
from tests.gateway.scripted import MP4, PARAMS, ScriptedModels
from triton_repo.errors import ServerError
from triton_repo.messages import ClientError, Failure

pytestmark = pytest.mark.anyio


async def test_a_job_ends_with_its_clip_and_a_full_record(start: Start) -> None:
    async with start() as one:
        job = await one.post(PARAMS)
        assert (job["status"], job["progress"], job["object"]) == ("queued", 0, "video")
        ended = await one.ended(job["id"])
        assert (ended["status"], ended["progress"], ended["error"]) == ("completed", 100, None)
        assert (ended["size"], ended["num_frames"], ended["fps"], ended["outputs"]) == ("256x256", 107, 24, 1)
        assert ended["stage_durations"] == {"encode": 0.9, "denoise": 9.0}
        assert ended["file_name"] == f"{job['id']}.mp4"
        assert ended["resolved"]["notes"] == ["duration 4.0 is 96 frames, raised to 107 (17n + 5)"]
        assert (await one.client.get(f"/v1/videos/{job['id']}/content")).content == MP4 + b"0"


async def test_all_outputs_of_a_job_can_be_had(start: Start) -> None:
    async with start() as one:
        job = await one.ended((await one.post({**PARAMS, "num_outputs_per_prompt": 3}))["id"])
        content = f"/v1/videos/{job['id']}/content"
        for index in range(3):
            assert (await one.client.get(content, params={"index": index})).content == MP4 + str(index).encode()
        assert (await one.client.get(content, params={"index": 3})).status_code == 404
        archive = zipfile.ZipFile(io.BytesIO((await one.client.get(content, params={"archive": "zip"})).content))
        assert [archive.read(f"{index}.mp4") for index in range(3)] == [MP4 + str(n).encode() for n in range(3)]


async def test_progress_only_grows_and_says_the_share_of_the_work(start: Start) -> None:
    async with start(ScriptedModels(free=False)) as one:
        job = await one.post(PARAMS)
        run = await one.models.begun()
        seen = []
        for _ in range(3):
            seen.append((await one.client.get(f"/v1/videos/{job['id']}")).json()["progress"])
            run.step()
            await asyncio.sleep(0.02)
        assert seen == [5, 31, 58]
        assert (await one.ended(job["id"]))["progress"] == 100


async def test_deleting_a_running_job_cancels_it_on_the_server(start: Start) -> None:
    async with start(ScriptedModels(free=False)) as one:
        job = await one.post(PARAMS)
        run = await one.models.begun()
        assert (await one.client.delete(f"/v1/videos/{job['id']}")).json()["deleted"] is True
        await asyncio.wait_for(run.cancelled.wait(), 5)
        for path in ("", "/content", "/events"):
            assert (await one.client.get(f"/v1/videos/{job['id']}{path}")).status_code == 404
        assert (await one.client.delete(f"/v1/videos/{job['id']}")).status_code == 404


async def test_a_second_deletion_meanwhile_is_told_so(start: Start) -> None:
    async with start(ScriptedModels(free=False)) as one:
        job = await one.post(PARAMS)
        await one.models.begun()
        path = f"/v1/videos/{job['id']}"
        answers = await asyncio.gather(one.client.delete(path), one.client.delete(path))
        assert sorted(answer.status_code for answer in answers) == [200, 409]


async def test_deleting_a_waiting_job_never_runs_it(start: Start) -> None:
    async with start(ScriptedModels(free=False), concurrency=1) as one:
        await one.post(PARAMS)
        first = await one.models.begun()
        waiting = await one.post({**PARAMS, "seed": 2})
        assert waiting["queue_position"] == 0
        assert (await one.client.delete(f"/v1/videos/{waiting['id']}")).status_code == 200
        for _ in range(3):
            first.step()
        await asyncio.sleep(0.05)
        assert len(one.models.runs) == 1


async def test_the_queue_is_bounded_and_says_when_to_come_back(start: Start) -> None:
    turned = TurnedClock()
    async with start(ScriptedModels(free=False), turned.clock, concurrency=1, queue=1) as one:
        await one.post(PARAMS)
        run = await one.models.begun()
        turned.monotonic += 10
        run.step()  # a third of the denoising: 31 of 100 in 10 s
        await asyncio.sleep(0.05)
        await one.post({**PARAMS, "seed": 2})
        refused = await one.client.post("/v1/videos", json={"prompt": "a fox", **PARAMS})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["Retry-After"]) == 23  # 10 s x 69 / 31


async def test_the_same_idempotency_key_is_one_job_however_often_it_comes(start: Start) -> None:
    async with start(ScriptedModels(free=False)) as one:
        key = {"Idempotency-Key": "one"}
        jobs = await asyncio.gather(*(one.post(PARAMS, **key) for _ in range(5)))
        assert len({job["id"] for job in jobs}) == 1
        other = await one.client.post("/v1/videos", json={"prompt": "a hare", **PARAMS}, headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
        await one.client.delete(f"/v1/videos/{jobs[0]['id']}")
        late = await one.client.post("/v1/videos", json={"prompt": "a fox", **PARAMS}, headers=key)
        assert late.status_code == 409
        assert len(one.models.runs) <= 1


async def test_a_full_queue_still_knows_a_request_that_it_has_accepted(start: Start) -> None:
    async with start(ScriptedModels(free=False), concurrency=1, queue=1) as one:
        first = await one.post(PARAMS, **{"Idempotency-Key": "one"})
        await one.post({**PARAMS, "seed": 2})
        assert (await one.post(PARAMS, **{"Idempotency-Key": "one"}))["id"] == first["id"]


async def test_what_the_server_refuses_names_the_field(start: Start) -> None:
    async with start() as one:
        answer = await one.client.post("/v1/videos", json={"prompt": "a fox", **PARAMS, "fps": 30})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["field"]) == ("invalid_request", "fps")
        assert error["message"].startswith("fps: got 30; ")


@pytest.mark.parametrize(
    ("failure", "code", "status"),
    [
        (ClientError(Failure.UNAVAILABLE, "no server answers"), "unavailable", 503),
        (ClientError(Failure.INTERNAL, "h3_stream failed"), "internal", 500),
        (RuntimeError("a fault of the gateway"), "internal", 500),
    ],
)
async def test_a_job_that_fails_says_why_under_the_status_of_its_error(
    start: Start, failure: Exception, code: str, status: int
) -> None:
    async with start(ScriptedModels(free=False)) as one:
        job = await one.post(PARAMS)
        (await one.models.begun()).step(failure)
        await one.ended(job["id"])
        answer = await one.client.get(f"/v1/videos/{job['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert (await one.client.get(f"/v1/videos/{job['id']}/content")).status_code == 422
        assert not any(one.gateway.settings.folder.glob("clips/*"))
        assert (await one.post(PARAMS))["status"] == "queued"


@pytest.mark.parametrize("told", ["Exceeds maximum queue size", "failed to connect to all addresses"])
async def test_a_job_that_has_not_begun_waits_for_a_server_that_is_full_or_away(
    start: Start, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setattr("gateway.jobs.RETRY_SECONDS", RETRY_SECONDS / 50)
    turned, models = TurnedClock(), ScriptedModels()
    models.refusals = [ClientError(Failure.UNAVAILABLE, told) for _ in range(3)]
    async with start(models, turned.clock) as one:
        assert (await one.ended((await one.post(PARAMS))["id"]))["status"] == "completed"
        assert models.refusals == []
        models.refusals = [ClientError(Failure.UNAVAILABLE, told) for _ in range(1000)]
        job = await one.post(PARAMS)
        await asyncio.sleep(0.05)
        turned.monotonic += PATIENCE_SECONDS
        assert (await one.ended(job["id"]))["error"]["code"] == "unavailable"


async def test_urgent_jobs_leave_the_queue_first_and_a_priority_is_a_number_of_two(start: Start) -> None:
    async with start(ScriptedModels(free=False), concurrency=1) as one:
        await one.post(PARAMS)
        first = await one.models.begun()
        await one.post({**PARAMS, "seed": 2})
        urgent = await one.post({**PARAMS, "seed": 3, "priority": 1})
        assert urgent["queue_position"] == 0
        for _ in range(3):
            first.step()
        assert (await one.models.begun(2)).asked.params["seed"] == 3
        answer = await one.client.post("/v1/videos", json={"prompt": "a fox", **PARAMS, "priority": 3})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "priority")


async def test_a_job_that_the_queue_makes_late_is_refused_at_once(start: Start) -> None:
    estimate = {"seconds": 20.0, "arrival": 0, "queue": {"waiting": 0, "running": 1, "seconds": 10.0}}
    models = ScriptedModels(free=False, estimate=estimate)
    async with start(models, concurrency=1) as one:
        for seed in range(3):
            assert (await one.post({**PARAMS, "seed": seed}))["estimate_s"] == 20.0
        await models.begun()
        for deadline, status in ((69.0, 429), (71.0, 200)):  # two that wait, what the server has, itself
            body = {"prompt": "a fox", **PARAMS, "deadline": deadline}
            answer = await one.client.post("/v1/videos", json=body)
            assert answer.status_code == status
        refused = (await one.client.post("/v1/videos", json={"prompt": "a fox", **PARAMS, "deadline": 1})).json()
        assert (refused["error"]["code"], refused["error"]["field"]) == ("late", "deadline")


@pytest.mark.parametrize(
    ("failure", "code", "status"),
    [
        (
            ClientError(Failure.INVALID, "deadline: got 2.0; the request takes about 9.1 s on this server"),
            "deadline",
            422,
        ),
        (ClientError(Failure.UNAVAILABLE, "late: the deadline of 2 s cannot be met: 2.1 s have passed"), "late", 429),
        (ClientError(Failure.UNAVAILABLE, "Request timeout expired"), "late", 429),
        (
            ClientError(Failure.INVALID, "deadline: got -1; must be a number, from 0.1 to 86400 seconds"),
            "invalid_request",
            400,
        ),
    ],
)
async def test_a_deadline_that_the_server_refuses_is_told_by_what_would_help(
    start: Start, failure: ClientError, code: str, status: int
) -> None:
    models = ScriptedModels()
    models.refusals = [failure]
    async with start(models) as one:
        job = await one.post(PARAMS)
        await one.ended(job["id"])
        answer = await one.client.get(f"/v1/videos/{job['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("moment", ["append", "publish"])
async def test_a_full_disk_fails_the_job_and_leaves_no_half_file(
    start: Start, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    async with start() as one:

        def full(*arguments: Any) -> None:
            # As far as a real write gets before it fails.
            part = one.gateway.settings.folder / "clips" / f"{arguments[1]}.part"
            part.mkdir(exist_ok=True)
            (part / "0.mp4").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(f"gateway.clips.Clips.{moment}", full)
        job = await one.ended((await one.post(PARAMS))["id"])
        assert (job["status"], job["error"]["code"]) == ("failed", "storage")
        assert "No space left on device" in job["error"]["message"]
        assert list((one.gateway.settings.folder / "clips").iterdir()) == []
        monkeypatch.undo()
        assert (await one.ended((await one.post(PARAMS))["id"]))["status"] == "completed"


async def test_a_clip_whose_record_cannot_be_written_is_no_result(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(ScriptedModels(free=False)) as one:
        job = await one.post(PARAMS)
        run = await one.models.begun()

        def full(*arguments: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(JobStore, "save", full)
        for _ in range(3):
            run.step()
        ended = await one.ended(job["id"])
        assert (ended["status"], ended["error"]["code"]) == ("failed", "storage")
        assert list((one.gateway.settings.folder / "clips").iterdir()) == []
        refused = await one.client.post("/v1/videos", json={"prompt": "a fox", **PARAMS})
        assert refused.status_code == 200  # adding is another call, which works
        monkeypatch.undo()
        await one.gateway.jobs.sweep()
        assert (await one.ended(job["id"]))["error"]["code"] == "storage"


async def test_a_restart_fails_what_ran_and_serves_what_was_finished(start: Start) -> None:
    async with start() as one:
        done = await one.ended((await one.post(PARAMS))["id"])
    models = ScriptedModels(free=False)
    async with start(models, concurrency=1) as one:
        running = await one.post({**PARAMS, "seed": 2})
        await models.begun()
        waiting = await one.post({**PARAMS, "seed": 3})
        # What kill -9 leaves: the file as it is, without anybody who closes it.
        folder = one.gateway.settings.folder
        image = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
    for path, data in image.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    leftover = folder / "clips" / f"{running['id']}.part"
    leftover.mkdir()
    (leftover / "0.mp4").write_bytes(b"half")
    async with start() as one:
        for job, state in ((running, "in progress"), (waiting, "queued")):
            answer = await one.client.get(f"/v1/videos/{job['id']}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "restarted")
            assert state in answer.json()["error"]["message"]
        assert (await one.client.get(f"/v1/videos/{done['id']}")).json() == done
        assert (await one.client.get(f"/v1/videos/{done['id']}/content")).content == MP4 + b"0"
        assert [path.name for path in (folder / "clips").iterdir()] == [done["id"]]


async def test_a_stop_lets_accepted_jobs_end_and_takes_no_more(start: Start) -> None:
    async with start(ScriptedModels(free=False), concurrency=1) as one:
        jobs = [await one.post({**PARAMS, "seed": seed}) for seed in range(2)]
        draining = asyncio.create_task(one.gateway.jobs.drain(60))
        await asyncio.sleep(0)
        refused = await one.client.post("/v1/videos", json={"prompt": "a fox", **PARAMS})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (await one.client.get("/readyz")).status_code == 503
        assert (await one.client.get("/healthz")).status_code == 200
        for number in range(2):
            run = await one.models.begun(number + 1)
            for _ in range(3):
                run.step()
        drained = await draining
        assert (drained.completed, drained.failed, drained.cut) == (2, 0, 0)
        assert [(await one.ended(job["id"]))["status"] for job in jobs] == ["completed", "completed"]


async def test_a_stop_that_is_too_short_fails_the_rest_with_a_reason(start: Start) -> None:
    async with start(ScriptedModels(free=False), concurrency=1) as one:
        jobs = [await one.post({**PARAMS, "seed": seed}) for seed in range(2)]
        run = await one.models.begun()
        drained = await one.gateway.jobs.drain(0.05)
        assert (drained.completed, drained.failed, drained.cut) == (0, 2, 2)
        assert run.cancelled.is_set()
        for job in jobs:
            assert (await one.ended(job["id"]))["error"]["code"] == Code.DRAINING


async def test_clips_are_kept_for_a_time_that_no_clock_can_shorten(start: Start) -> None:
    turned = TurnedClock()
    async with start(clock=turned.clock, keep_seconds=1000) as one:
        job = await one.ended((await one.post(PARAMS))["id"])
        turned.wall += 10_000_000
        await one.gateway.jobs.sweep()
        assert (await one.client.get(f"/v1/videos/{job['id']}/content")).status_code == 200
        turned.wall -= 20_000_000
        turned.monotonic += 900
        later = await one.ended((await one.post(PARAMS))["id"])
        assert later["created_at"] < job["created_at"]
        listed = (await one.client.get("/v1/videos", params={"order": "asc"})).json()["data"]
        assert [one["id"] for one in listed] == [job["id"], later["id"]]
    # Uptime is counted on over a restart, at which the monotonic clock begins anew.
    turned.monotonic = 5.0
    async with start(clock=turned.clock, keep_seconds=1000) as one:
        assert (await one.client.get(f"/v1/videos/{job['id']}/content")).status_code == 200
        turned.monotonic += 101
        await one.gateway.jobs.sweep()
        assert (await one.client.get(f"/v1/videos/{job['id']}/content")).status_code == 404
        assert (await one.client.get(f"/v1/videos/{later['id']}/content")).status_code == 200
        assert not (one.gateway.settings.folder / "clips" / job["id"]).exists()


async def test_the_oldest_clips_make_room_for_new_ones(start: Start) -> None:
    async with start(keep_bytes=2 * len(MP4 + b"0")) as one:
        jobs = [await one.ended((await one.post({**PARAMS, "seed": seed}))["id"]) for seed in range(3)]
        await asyncio.sleep(0.05)
        found = [(await one.client.get(f"/v1/videos/{job['id']}")).status_code for job in jobs]
        assert found == [404, 200, 200]


async def test_files_of_waiting_jobs_have_a_bound_of_their_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.jobs.HELD_BYTES", 0)
    async with start() as one:
        image = {"input_reference": ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(100), "image/png")}
        answer = await one.client.post("/v1/videos", data={"prompt": "a fox"}, files=image)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert (await one.post(PARAMS))["status"] == "queued"


async def test_sync_answers_with_the_clip_and_what_it_took(start: Start) -> None:
    async with start() as one:
        answer = await one.client.post("/v1/videos/sync", json={"prompt": "a fox", **PARAMS})
        assert (answer.status_code, answer.content) == (200, MP4 + b"0")
        assert answer.headers["Content-Type"] == "video/mp4"
        assert answer.headers["X-Model"] == "h3"
        assert "denoise" in answer.headers["X-Stage-Durations"]
        assert float(answer.headers["X-Inference-Time-S"]) >= 0
        assert (await one.ended(answer.headers["X-Request-Id"]))["status"] == "completed"


async def test_sync_gives_up_after_its_time_and_cancels(start: Start) -> None:
    async with start(ScriptedModels(free=False), sync_seconds=0.05) as one:
        answer = await one.client.post("/v1/videos/sync", json={"prompt": "a fox", **PARAMS})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert one.models.runs[0].cancelled.is_set()


@pytest.mark.parametrize("also_posted", [True, False])
async def test_a_client_that_leaves_cancels_a_job_unless_its_key_was_also_posted(
    start: Start, also_posted: bool
) -> None:
    async with start(ScriptedModels(free=False)) as one:
        key = {"Idempotency-Key": "one"}
        body = json.dumps({"prompt": "a fox", **PARAMS}).encode()
        waiting = Connection(one, "POST", "/v1/videos/sync", body, **key)
        run = await one.models.begun()
        if also_posted:
            assert (await one.post(PARAMS, **key))["id"] == run.request_id
        waiting.close()
        if not also_posted:
            await asyncio.wait_for(run.cancelled.wait(), 5)
        await asyncio.sleep(0.05)
        for _ in range(3):
            run.step()
        ended = await one.ended(run.request_id)
        await waiting.task
        assert (ended["status"], run.cancelled.is_set()) == (("completed", False) if also_posted else ("failed", True))


async def test_sync_that_waited_too_long_leaves_a_posted_job_alone(start: Start) -> None:
    async with start(ScriptedModels(free=False), sync_seconds=0.05) as one:
        key = {"Idempotency-Key": "one"}
        job = await one.post(PARAMS, **key)
        run = await one.models.begun()
        answer = await one.client.post("/v1/videos/sync", json={"prompt": "a fox", **PARAMS}, headers=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        for _ in range(3):
            run.step()
        assert (await one.ended(job["id"]))["status"] == "completed"


async def test_events_continue_where_a_client_left_them(start: Start) -> None:
    async with start(ScriptedModels(free=False)) as one:
        job = await one.post(PARAMS)
        run = await one.models.begun()
        events = f"/v1/videos/{job['id']}/events"
        whole = asyncio.create_task(one.client.get(events))
        late = asyncio.create_task(one.client.get(events, headers={"Last-Event-ID": "2"}))
        await asyncio.sleep(0.02)
        for _ in range(3):
            run.step()
        first, second = _events((await whole).text), _events((await late).text)
        assert [event["id"] for event in first] == ["1", "2", "3", "4", "5", "6", "end"]
        assert [event["event"] for event in first] == ["status", *["progress"] * 5, "status"]
        assert second == first[2:]
        assert (await one.client.get(events, headers={"Last-Event-ID": "end"})).status_code == 204
        assert _events((await one.client.get(events)).text) == first[-1:]


def _events(text: str) -> list[dict[str, str]]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith("retry")]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


async def test_pages_of_the_list_hold_every_job_once(start: Start) -> None:
    async with start(queue=20) as one:
        ids = [(await one.post({**PARAMS, "seed": seed}))["id"] for seed in range(7)]
        for order, expected in (("asc", ids), ("desc", ids[::-1])):
            found: list[str] = []
            more: dict[str, Any] = {"has_more": True, "last_id": None}
            while more["has_more"]:
                query = {"limit": 3, "order": order} | ({"after": more["last_id"]} if more["last_id"] else {})
                more = (await one.client.get("/v1/videos", params=query)).json()
                found += [job["id"] for job in more["data"]]
            assert found == expected
        assert (await one.client.get("/v1/videos", params={"limit": 0})).json()["has_more"] is True
        absent = await one.client.get("/v1/videos", params={"after": f"video_gen_{'0' * 32}"})
        assert (absent.status_code, absent.json()["error"]["field"]) == (400, "after")


def test_a_database_of_another_version_or_none_at_all_is_refused_with_what_mends_it(tmp_path: Path) -> None:
    clock = TurnedClock().clock
    file = tmp_path / "jobs.sqlite"
    JobStore(file, clock).close()
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(ServerError, match=r"version 9 .*; move its folder away: mv "):
        JobStore(file, clock)
    file = tmp_path / "other.sqlite"
    file.write_bytes(b"not a database" * 1000)
    with pytest.raises(ServerError, match=r"is damaged.*; move its folder away: mv "):
        JobStore(file, clock)

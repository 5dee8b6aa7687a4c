"""Who gets in: keys, other sites' pages, names that were made to lead here; and what leaves no trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.keys import Keys
from gateway.page import Page
from gateway.server import serve
from gateway.settings import GatewaySettings
from tests.gateway.conftest import Start
from tests.gateway.scripted import PARAMS
from triton_repo.errors import ServerError

ONE, OTHER = "a-key-of-sixteen-characters", "another-key-of-some-length"
ALL = ("/v1/videos", "/v1/models", "/metrics", f"/v1/videos/video_gen_{'0' * 32}")


@pytest.mark.anyio
async def test_without_a_key_only_what_tells_nothing_is_open(start: Start) -> None:
    async with start(keys=Keys({ONE: "one"})) as one:
        for path in ("/", "/healthz", "/readyz", "/openapi.json"):
            assert (await one.client.get(path)).status_code == 200
        for header in (None, "", f"Basic {ONE}", f"Bearer {ONE}x", "Bearer", f"Bearer {ONE[:-1]}", "Bearer \xff"):
            for path in ALL:
                headers = {} if header is None else {"Authorization": header.encode("latin-1")}
                answer = await one.client.get(path, headers=headers)
                assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert (await one.client.post("/v1/videos", json={"prompt": "p", **PARAMS})).status_code == 401


@pytest.mark.anyio
async def test_the_jobs_of_one_key_do_not_exist_for_another(start: Start) -> None:
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in (ONE, OTHER))
    async with start(keys=Keys({ONE: "one", OTHER: "other"})) as one:
        job = await one.post(PARAMS, **mine, **{"Idempotency-Key": "k"})
        active = one.gateway.jobs.active(job["id"])
        assert active is not None
        await active.ended.wait()
        path = f"/v1/videos/{job['id']}"
        for suffix in ("", "/content", "/events"):
            assert (await one.client.get(path + suffix, headers=theirs)).status_code == 404
            assert (await one.client.get(path + suffix, headers=mine)).status_code == 200
        assert (await one.client.delete(path, headers=theirs)).status_code == 404
        assert (await one.client.get("/v1/videos", headers=theirs)).json()["data"] == []
        assert (await one.post(PARAMS, **theirs, **{"Idempotency-Key": "k"}))["id"] != job["id"]


def test_a_file_of_keys_is_read_or_refused_without_showing_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# for all\n\none {ONE}\nother   {OTHER}\n")
    keys = Keys.read(file)
    assert keys.owner(f"Bearer {ONE}") == "one"
    assert keys.owner(f"bearer {OTHER}") == "other"
    assert keys.owner(f"Bearer {ONE}".replace("a", "b")) is None
    assert ONE not in repr(vars(keys))
    for text, told in ((f"{ONE}\n", "line 1"), ("one short\n", "line 1"), ("# nothing\n", "holds no key")):
        file.write_text(text)
        with pytest.raises(ServerError, match=told) as caught:
            Keys.read(file)
        assert ONE not in str(caught.value)


def test_every_key_is_compared_in_constant_time_whichever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys({ONE: "one", OTHER: "other"})
    compared: list[tuple[bytes, bytes]] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return False

    monkeypatch.setattr("hmac.compare_digest", compare)
    for key in (ONE, OTHER, "a-key-that-nobody-has"):
        compared.clear()
        # What compare_digest denies, nothing else grants.
        assert keys.owner(f"Bearer {key}") is None
        assert len({known for known, _ in compared}) == 2
        assert all(len(known) == len(given) for known, given in compared)


def test_other_machines_are_let_in_with_keys_only(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="there are no keys; give --keys FILE, or --without-keys"):
        serve(GatewaySettings("127.0.0.1:1", tmp_path, host="0.0.0.0", port=0), print)


@pytest.mark.anyio
async def test_the_page_of_another_site_cannot_use_the_gateway(start: Start) -> None:
    async with start() as one:
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
            answer = await one.client.get("/v1/videos", headers={"Origin": origin})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        assert (await one.client.get("/v1/videos", headers={"Origin": "http://127.0.0.1"})).status_code == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "[", ""):
            assert (await one.client.get("/v1/videos", headers={"Host": host})).status_code == 403
        for host in ("localhost:8080", "[::1]:8080", "127.0.0.1"):
            assert (await one.client.get("/v1/videos", headers={"Host": host})).status_code == 200
    async with start(any_host=True) as one:
        assert (await one.client.get("/v1/videos", headers={"Host": "evil.example"})).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize(
    "job_id",
    ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "video_gen_", f"video_gen_{'A' * 32}", f"video_gen_{'0' * 33}", "a\0b"],
)
async def test_only_the_id_of_a_job_leads_anywhere(start: Start, job_id: str) -> None:
    async with start() as one:
        for suffix in ("", "/content", "/events"):
            answer = await one.client.get(f"/v1/videos/{job_id.replace(chr(0), '%00')}{suffix}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"


def test_the_page_loads_nothing_and_may_run_nothing_but_its_own_script() -> None:
    page = Page.read()
    html = page.html.decode()
    assert re.findall(r"https?://|//[a-z]+\.|<link|<img|\bsrc=|\bon[a-z]+=|javascript:|\bstyle=", html) == []
    assert "default-src 'none'" in page.policy
    assert "unsafe" not in page.policy
    assert len(re.findall(r"'sha256-[A-Za-z0-9+/]{43}='", page.policy)) == 2


@pytest.mark.anyio
async def test_metrics_are_prometheus_text_and_no_path_of_a_client_becomes_a_label(start: Start) -> None:
    async with start() as one:
        await one.ended((await one.post(PARAMS))["id"])
        await one.client.get("/no/such/path")
        text = (await one.client.get("/metrics")).text
        assert 'h3_gateway_jobs_ended_total{code="",status="completed"} 1.0' in text
        assert "/no/such" not in text
        for line in text.splitlines():
            assert re.fullmatch(r"# (HELP|TYPE) h3_gateway_.*|h3_gateway_[a-z_]+(\{.*\})? [-+0-9.e]+", line), line

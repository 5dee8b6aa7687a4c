"""The web page in a real browser, before the real models: type, watch, play, cancel."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import httpx2
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.serving.test_requests import PROMPT

WAIT_MILLISECONDS = 60_000


@pytest.fixture
def page(http: httpx2.Client) -> Iterator[Page]:
    """The page in a headless Chromium; whatever its script complains of fails the test."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on PATH: make browser installs one where it can")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--autoplay-policy=no-user-gesture-required"]
        )
        try:
            page = browser.new_page()
            page.set_default_timeout(WAIT_MILLISECONDS)
            complaints: list[str] = []
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda told: complaints.append(told.text) if told.type == "error" else None)
            page.goto(str(http.base_url))
            yield page
            # An answer that is no success is told there as well; the page says what it makes of it.
            assert [text for text in complaints if not text.startswith("Failed to load resource")] == []
        finally:
            browser.close()


def _ask(page: Page, steps: int) -> None:
    page.fill("#prompt", PROMPT)
    page.select_option("#aspect_ratio", "1:1")
    values = {"seconds": "4", "width": "256", "height": "256", "num_inference_steps": str(steps)}
    for name, value in values.items():
        page.fill(f"#{name}", value)
    page.click("#go")


def test_a_clip_is_made_watched_and_played_and_another_is_cancelled(page: Page, http: httpx2.Client) -> None:
    _ask(page, 4)
    card = page.locator("article").first
    expect(card.locator(".state")).to_have_text(re.compile(r"\d+%, denoise"), timeout=WAIT_MILLISECONDS)
    early = float(card.locator("progress").evaluate("bar => bar.value"))
    page.wait_for_function("early => document.querySelector('progress').value > early", arg=early)
    expect(card).to_have_attribute("data-status", "completed", timeout=WAIT_MILLISECONDS)
    video = card.locator("video")
    video.evaluate("video => { video.muted = true; return video.play(); }")
    page.wait_for_function("() => document.querySelector('video').currentTime > 0.2")
    facts = video.evaluate("video => [video.videoWidth, video.videoHeight, video.duration, video.error]")
    assert facts[:2] == [256, 256]
    assert facts[2] == pytest.approx(107 / 24, abs=0.1)
    assert facts[3] is None

    _ask(page, 200)
    other = page.locator("article").first
    expect(other.locator(".state")).to_have_text(re.compile(r"\d+%, denoise"), timeout=WAIT_MILLISECONDS)
    cancelled = str(other.get_attribute("id"))
    other.locator(".remove").click()
    expect(page.locator("article")).to_have_count(1)
    assert http.get(f"/v1/videos/{cancelled}").status_code == 404

    page.reload()  # what was made is still there
    expect(page.locator("article video")).to_have_count(1)


def test_a_refusal_is_shown_with_the_field_it_names(page: Page) -> None:
    page.evaluate("() => document.getElementById('form').noValidate = true")
    page.fill("#seconds", "99")
    page.fill("#prompt", PROMPT)
    page.click("#go")
    expect(page.locator("#refusal")).to_have_text(re.compile("^seconds: got '99'; must be whole seconds"))

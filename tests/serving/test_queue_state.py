"""The queue is read off the server's own metrics."""

from __future__ import annotations

from triton_repo.queue_state import queue_of

METRICS = """
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
nv_inference_pending_request_count{model="h3_stream",version="1"} 2
nv_inference_pending_request_count{model="h3_denoise",version="1"} 1
nv_inference_pending_request_count{model="h3",version="1"} 9
h3_running_requests{model="h3_stream"} 1
h3_running_requests{model="h3_prepare"} 1
"""
MEANS = {"h3_stream": 10.0, "h3_encode": 1.0, "h3_denoise": 6.0, "h3_decode": 2.0}


def test_what_waits_counts_whole_and_what_runs_half_and_later_stages_too() -> None:
    queue = queue_of(METRICS, MEANS)
    assert (queue.waiting, queue.running) == (3, 1)
    assert queue.seconds == 2.5 * 10 + 6 + 2


def test_without_a_measured_request_the_seconds_are_unknown_and_the_counts_are_not() -> None:
    queue = queue_of(METRICS, {"h3_stream": 10.0})
    assert (queue.waiting, queue.running, queue.seconds) == (3, 1, None)


def test_an_idle_server_makes_nobody_wait() -> None:
    assert queue_of("", {}).seconds == 0

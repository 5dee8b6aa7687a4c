"""What the models that share the device have before them, as the server's own metrics tell it."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.estimate import Queue
from triton_repo.metric_table import RUNNING, WAITING
from triton_repo.names import DECODE, DENOISE, ENCODE, STREAM
from triton_repo.scrape import value

CHAINS = ((STREAM,), (ENCODE, DENOISE, DECODE))
"""Models that a request goes through, one after the other."""


def queue_of(metrics: str, means: Mapping[str, float]) -> Queue:
    """The queue that Prometheus text tells of. `means`: seconds that requests take in each model, where known.

    A request that runs is taken to be half done. Requests take turns on the device, so that all of them count.
    """
    waiting = running = 0
    seconds = 0.0
    known = True
    for chain in CHAINS:
        for place, model in enumerate(chain):
            before, now = (int(value(metrics, metric, model=model) or 0) for metric in (WAITING, RUNNING.name))
            waiting, running = waiting + before, running + now
            if before + now:
                known = known and all(one in means for one in chain[place:])
                seconds += means.get(model, 0.0) * (before + now / 2)
                seconds += sum(means.get(later, 0.0) for later in chain[place + 1 :]) * (before + now)
    return Queue(waiting=waiting, running=running, seconds=round(seconds, 3) if known else None)

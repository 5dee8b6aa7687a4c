"""The way of decoded frames from the device that they were made on to host memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.tail import Chunk


def to_host(planes: torch.Tensor) -> Chunk:
    """Starts copying planes to pinned memory and returns what waits for them; on the CPU there is nothing to copy.

    The copy runs in the device's current stream, behind the work that makes the planes and before what follows, so the
    calling thread goes on at once.
    """
    if planes.device.type == "cpu":
        return planes.numpy
    # Torch keeps freed pinned blocks and gives them out again only once the copies into them have ended.
    host = torch.empty(planes.shape, dtype=planes.dtype, pin_memory=True)
    host.copy_(planes, non_blocking=True)
    # Blocking: a waiting thread sleeps, the cores belong to the encoder.
    arrived = torch.cuda.Event(blocking=True)
    arrived.record()

    def wait() -> NDArray[np.uint8]:
        arrived.synchronize()
        return host.numpy()

    return wait

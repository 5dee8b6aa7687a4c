"""Reads every hostile file in a process of its own and prints, a line each, how it ended and what it took."""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
from pathlib import Path

from runtime.media.facts import ImageFacts, Kind, VideoFacts
from runtime.media.frames import decode_video
from runtime.media.pixels import decode_image
from runtime.media.probe import probe
from runtime.refusal import RequestError

CPU_SECONDS = 2


def read(kind: Kind, data: bytes) -> dict[str, object]:
    """Probes a file and decodes it where that passes."""
    stage = "probe"
    try:
        facts = probe(data, kind, "IMAGES[3]")
        stage = "decode"
        if isinstance(facts, ImageFacts):
            decode_image(data, facts, "IMAGES[3]")
        elif isinstance(facts, VideoFacts):
            list(decode_video(data, facts, "IMAGES[3]", 0.0, facts.frames, (256, 256)))
    except RequestError as error:
        return {"stage": stage, "field": error.field, "error": str(error)}
    return {"stage": "accepted", "error": ""}


def peak_mb() -> int:
    """The most memory that this process ever had resident."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM"))


def report(result: dict[str, object]) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def main() -> None:
    """One forked child a file, so that its peak is its own; the limit on processor time ends one that does not end."""
    files: dict[str, tuple[Kind, bytes]] = pickle.loads(Path(sys.argv[1]).read_bytes())
    for name, (kind, data) in files.items():
        if pid := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status:
                report({"name": name, "stage": "killed", "error": f"ended by {status}"})
            continue
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        before = resource.getrusage(resource.RUSAGE_SELF)
        result = read(kind, data)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        report({"name": name, "cpu": cpu, "peak_mb": peak_mb(), **result})
        os._exit(0)


if __name__ == "__main__":
    main()

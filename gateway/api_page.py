"""docs/gateway.md, written from the routes, codes and limits: `python -m gateway.api_page docs/gateway.md`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway.app import Gateway
from gateway.errors import Code
from gateway.form import EXCLUSIVE, FIRST, INPUT, INPUTS, LAST, PRIORITY
from gateway.guard import OPEN_PATHS
from gateway.jobs import PATIENCE_SECONDS
from gateway.multipart import PARTS_MAXIMUM
from gateway.progress import EVENTS_KEPT
from gateway.settings import BODY_BYTES, BODY_SECONDS, HELD_BYTES, JOBS_KEPT, UPLOADS, GatewaySettings
from runtime.contract_page import markdown_table

_DEFAULTS = GatewaySettings("", Path())

_INTRODUCTION = """# The HTTP gateway

`h3trt gateway` offers `/v1/videos` over HTTP, and a web page, in front of a Triton server. It runs no engine. This page
is written from the gateway's own tables; a test fails when they differ.

<!-- needs: an engine store, two terminals and curl; the gateway's tests make the same calls -->

    h3trt serve
    h3trt gateway --triton 127.0.0.1:8001 --port 8080
    curl http://127.0.0.1:8080/v1/videos/sync -F prompt='A red fox runs over snow' -F aspect_ratio=16:9 -F seconds=5 \\
      -o clip.mp4

A browser finds the page under the same address: type a prompt, watch its progress, play the clip, cancel.

## Endpoints

"""

_JOBS = f"""
`/openapi.json` describes them all, with every field and answer.

## Requests

A body is JSON or `multipart/form-data`, of at most {BODY_BYTES >> 20} MiB. As JSON it is the parameters object of
[requests.md](requests.md) with `prompt` in it. In a form every field is a part: texts are texts, all other values are
written as JSON (`4`, `true`, `[0, -1]`), and files are the parts

- `{INPUT}`: one image, video or sound;
- `{INPUTS}`, as often as there are files: in the order in which the model shall read them;
- `{FIRST}`, `{LAST}`: images that are the first and the last frame of the clip.

What a file is, its type says, else the end of its name, else its first bytes. References may also be URLs
(`image_reference` and its like): the server fetches what its operator allows with `h3trt serve --media-host`, and the
gateway fetches nothing. `{PRIORITY.name}` is {PRIORITY.meaning}.

An unknown field is refused, as is one that has no effect beside another:

"""

_CONTRACT = f"""
`Idempotency-Key`: the same key with the same request stands for one job, however often it is sent and even after a
restart; with another request it is refused. A key is remembered as long as its job would be kept. A job whose key came
to `/v1/videos` too is not cancelled when a client of `/v1/videos/sync` leaves or has waited too long.

## Jobs

A job is `queued`, `in_progress`, `completed` or `failed`. Its record has the size, duration and notes of the request as
it was resolved, a percentage, and in the end the seconds of each stage. The record of a failed job comes with the HTTP
status of its error. `seconds` is what the clip has, not what was asked for.

- `GET .../events` tells progress as server-sent events. `Last-Event-ID` continues after a break, as far back as
  {EVENTS_KEPT} events; the last event has the id `end`.
- `GET .../content` serves one output (`index`), or all in a ZIP (`archive=zip`); Range requests work. With
  `media.container` `fragmented` it sends a clip while that is made, and so does `/v1/videos/sync`. A connection that
  ends without the last chunk says that the clip broke off.
- `DELETE` cancels, which the server notices before its next step, and removes. `/v1/videos/sync` cancels when its
  client closes the connection.
- Jobs that wait are sent in the order of their priority, then of their acceptance. One that has not begun when the
  server is full or is being started again waits for it, at most {PATIENCE_SECONDS:g} s.
- A job that ran or waited when the gateway itself ended is `failed` with the code `restarted`: it is not run again, for
  nobody may be waiting for it. Finished clips are served on.
- Ended jobs are kept `--keep-days` ({_DEFAULTS.keep_seconds / 86400:g}), counted while the gateway runs and so by no
  clock that can jump, and at most {JOBS_KEPT} of them; the oldest clips go when all take more than `--keep`
  ({_DEFAULTS.keep_bytes >> 30} GiB).

## Errors

Every error is `{{"error": {{"code": ..., "message": ..., "field": ...}}}}`; `field` names what it is about, or is null.
The message of a refused request is the server's own: the value, the rule and the nearest legal value.

"""

_LIMITS = f"""
`Retry-After` of a full queue is what the first job to end will still take: by what it has done so far, else by the
server's estimate. `deadline` counts the jobs that wait in the gateway; `priority` 1 goes before them.

## Limits

- `--queue` ({_DEFAULTS.queue}) jobs wait and `--concurrency` ({_DEFAULTS.concurrency}) are with the server; their files
  together have at most {HELD_BYTES >> 20} MiB. More is refused with 429.
- {UPLOADS} bodies are read at a time, each of at most {PARTS_MAXIMUM} parts; one that comes to a halt for
  {BODY_SECONDS:g} s is given up. Limits are enforced while a body arrives.
- `/v1/videos/sync` takes at most `--sync-timeout` ({_DEFAULTS.sync_seconds:g} s), after which the job is cancelled.

## Access

The gateway listens on loopback. Another address needs `--keys FILE`, or `--without-keys` where something in front asks
for them. A line of the file is `NAME KEY`; clients send `Authorization: Bearer KEY`, and see the jobs of their own name
only. Keys are kept as hashes and compared in constant time. Without a key there are {", ".join(sorted(OPEN_PATHS))}.

Pages of other sites are refused by their `Origin`, and without keys so is every `Host` but loopback's. The page loads
nothing from elsewhere and may run its own script only (`Content-Security-Policy`).

## Stopping

SIGTERM or Ctrl-C refuses new jobs with 503, lets the accepted ones finish for `--drain-timeout`
({_DEFAULTS.drain_seconds:g} s), fails the rest with the code `draining`, and says how many there were. Stop the gateway
before Triton. Exit code 5 says that jobs were cut off.
"""


def page() -> str:
    """The whole page, Markdown."""
    others = [(f"`{name}`", ", ".join(f"`{other}`" for other in beside)) for name, beside in EXCLUSIVE]
    parts = (
        _INTRODUCTION,
        markdown_table(("call", "what it does", "answers"), _calls()),
        _JOBS,
        markdown_table(("field", "not beside"), others),
        _CONTRACT,
        markdown_table(("status", "code", "what it says"), _codes()),
        _LIMITS,
    )
    return "".join(parts)


def _calls() -> Iterator[tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        document = Gateway(GatewaySettings("", Path(folder))).app.openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"`{method.upper()} {path}`", _summary(operation), ", ".join(sorted(operation["responses"]))


def _summary(operation: dict[str, Any]) -> str:
    """The first paragraph of what an operation says of itself."""
    return " ".join(operation["description"].partition("\n\n")[0].split())


def _codes() -> Iterator[tuple[str, ...]]:
    for code in sorted(Code, key=lambda one: (one.status, one)):
        yield str(code.status), f"`{code}`", code.meaning


def main() -> None:
    """Writes the page to the path given as the first argument."""
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

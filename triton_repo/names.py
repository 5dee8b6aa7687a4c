"""Names that the renderer, the models, the server and its clients share."""

from __future__ import annotations

ENSEMBLE, STREAM = "h3", "h3_stream"
PREPARE, ENCODE, DENOISE, DECODE = "h3_prepare", "h3_encode", "h3_denoise", "h3_decode"

PUBLIC_MODELS = (ENSEMBLE, STREAM)
"""The models that clients call; loading the ensemble brings the four stages with it."""

STORE_PARAMETER = "store"
"""The model parameter that holds the path of the engine store."""

MEDIA_HOSTS_PARAMETER, MEDIA_ROOT_PARAMETER = "media_hosts", "media_root"
"""Model parameters: hosts whose URLs are fetched, with commas between them, and the folder whose files are read."""

CACHE_PARAMETER = "condition_cache"
"""The model parameter that holds the bytes of encoded prompts and references that a process may keep."""

DEFAULT_CONDITION_CACHE = 256 << 20
"""Those bytes, unless the operator says otherwise."""

DEFAULT_QUEUE = 8
"""Requests of one priority that may wait for a model, unless the operator says otherwise."""

DEFAULT_QUEUE_SECONDS = 86_400.0
"""How long they may, unless the operator says otherwise."""

DEFAULT_RESTARTS, DEFAULT_HANG_SECONDS = 5, 900.0
"""How often in a row a lost server is started again, and how long one may make no progress, likewise."""

STALL_PARAMETER = "stall"
"""The model parameter that holds the seconds after which ranks that do not move are lost; 0: never."""

STALL_SHARE = 2 / 3
"""Of what a whole server may take to move: its ranks are started again before it is."""

STATE_PARAMETER = "state"
"""The model parameter that holds the folder of what a server remembers from one start to the next; empty: none."""

WARM_PARAMETER, WARM = "warm", "yes"
"""The model parameter that says whether to run requests before the model is ready, and how it says so."""

DEVICE_MODELS = (STREAM, ENCODE, DENOISE, DECODE)
"""The models that run engines, one request at a time."""

METRICS_VARIABLE = "H3TRT_METRICS_ADDRESS"
"""The environment variable that tells models where their own server publishes its metrics, as host:port."""

ARRIVAL = "arrival"
"""The request parameter that says when a request came, as its estimate says it."""

HIGH, NORMAL = 1, 2
"""Priorities of requests, as Triton counts them: what is HIGH leaves the queue before what is NORMAL, the default."""

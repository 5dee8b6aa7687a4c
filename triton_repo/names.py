"""Names that the renderer, the models, the server and its clients share."""

from __future__ import annotations

ENSEMBLE, STREAM = "h3", "h3_stream"
PREPARE, ENCODE, DENOISE, DECODE = "h3_prepare", "h3_encode", "h3_denoise", "h3_decode"

PUBLIC_MODELS = (ENSEMBLE, STREAM)
"""The models that clients call; loading the ensemble brings the four stages with it."""

STORE_PARAMETER = "store"
"""The model parameter that holds the path of the engine store."""

RUNNING_METRIC = "h3_running_requests"
"""The gauge of the requests that a model works on; Triton itself only counts those that wait."""

"""Writes checkpoints: a miniature of the release with real weights, and the release's sizes in sparse files.

Beside either, few-step artifacts of every family. From outside, use the names below.
"""

from export.miniature.artifacts import FOLDERS, write_artifacts
from export.miniature.write import ARTIFACTS, write_miniature, write_sparse_released

__all__ = ["ARTIFACTS", "FOLDERS", "write_artifacts", "write_miniature", "write_sparse_released"]

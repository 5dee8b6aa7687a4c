"""Writes checkpoints: a miniature of the release with real weights, and the release's sizes in sparse files.

From outside, use the two functions below.
"""

from export.miniature.write import write_miniature, write_sparse_released

__all__ = ["write_miniature", "write_sparse_released"]

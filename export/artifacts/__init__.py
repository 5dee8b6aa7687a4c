"""Few-step artifacts: what their files say, whether they are sound, and what they do to a transformer.

From outside, use the names below. `open_artifact` is for what is to be fused or served: it has read the payload too.
"""

from export.artifacts.artifact import Artifact, LowRank, Patch
from export.artifacts.base import RELEASED, Base
from export.artifacts.fasth3_v2 import WholeStudent
from export.artifacts.fits import check_fits, partition_of
from export.artifacts.payload import check_finite
from export.artifacts.read import open_artifact, read_artifact

__all__ = [
    "RELEASED",
    "Artifact",
    "Base",
    "LowRank",
    "Patch",
    "WholeStudent",
    "check_finite",
    "check_fits",
    "open_artifact",
    "partition_of",
    "read_artifact",
]

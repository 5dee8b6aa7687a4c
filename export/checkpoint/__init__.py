"""Opens checkpoints: `Checkpoint.open` detects the layout and gives lazy, typed weight expressions by name.

From outside, use the names below; the modules behind them are free to change.
"""

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Concat, Mapped, Stored, Weight
from export.checkpoint.materialise import materialise

__all__ = ["Checkpoint", "CheckpointError", "Concat", "Mapped", "Stored", "Weight", "materialise"]

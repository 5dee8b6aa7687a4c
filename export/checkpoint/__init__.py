"""Opens checkpoints: `Checkpoint.open` detects the layout and gives lazy, typed weight expressions by name."""

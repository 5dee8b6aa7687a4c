"""Few-step artifacts: what their files say, whether they are sound, and what they do to a transformer."""

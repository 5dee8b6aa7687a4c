"""Trials of the skipping attention kernel on a GPU; taken out again once they have run."""

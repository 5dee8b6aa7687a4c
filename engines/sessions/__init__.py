"""Runners: the half of each backend that a serving host imports, with weights bound from the checkpoint's own bytes."""

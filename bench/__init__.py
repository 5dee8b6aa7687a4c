"""Measurements beside peers, in the same run: `h3trt bench`. Data and weights are random, never zeros."""

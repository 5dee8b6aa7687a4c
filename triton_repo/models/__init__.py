"""The `model.py` of every Python model; the renderer copies them, and only Triton's Python stub can import them."""

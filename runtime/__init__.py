"""Serving host: request to plan to tensors to media, on opened engines. Needs no checkpoint reader and no diffusers."""

"""Serving host: request to plan to tensors to media, on opened engines. Needs neither a checkpoint reader nor diffusers."""

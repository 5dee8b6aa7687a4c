"""Kernels for GPUs: CUDA sources that are compiled where they first run, and what launches them."""

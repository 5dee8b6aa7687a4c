"""Kernels in the Triton language, for GPUs; imported when an op first runs there, since CPU hosts have no compiler."""

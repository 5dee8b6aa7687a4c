"""Kernels for GPUs, in the Triton language or in CUDA C++: imported and compiled when an op first runs on one."""

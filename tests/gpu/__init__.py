"""Compares the CUDA part with the CPU's bits: bench/gpu.py does on a GPU, __main__ without one."""

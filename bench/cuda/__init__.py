"""The stages of bench/gpu.py, which checks and times the CUDA part."""

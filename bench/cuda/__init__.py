"""Times the CUDA part: stages of bench/gpu.py, whose checks are in tests/gpu."""

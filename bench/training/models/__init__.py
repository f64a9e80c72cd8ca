"""Networks that several benchmarks train, and the text that some of them learn."""

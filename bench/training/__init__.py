"""Training with DistributedDataParallel: accuracy, steps, memory, and the demo."""

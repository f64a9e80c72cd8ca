"""The hook for DistributedDataParallel: `register`, its State, and how a step's buckets travel."""

"""One step of the hook: buckets in, averages out, and what stays from one step to the next."""

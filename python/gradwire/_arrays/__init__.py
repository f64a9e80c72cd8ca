"""The arrays of a call: where they lie in memory, and which of them it reads and writes."""

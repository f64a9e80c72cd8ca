"""What a codec computes on one rank, and what its block sizes cost and buy."""

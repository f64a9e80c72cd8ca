"""Local SGD and DiLoCo: parameters that all ranks share, rounds of inner steps, their exchange."""

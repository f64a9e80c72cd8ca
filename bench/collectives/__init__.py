"""How long collectives take: the pytest-benchmark suite, two trees in turns, the cost model."""

"""How long collectives take on the ranks that run, and the cost model that foretells it."""

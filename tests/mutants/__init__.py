"""Mutation runs: small changes of the sources, which the tests must notice."""

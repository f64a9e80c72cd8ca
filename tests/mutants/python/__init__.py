"""Mutation runs over the Python code."""

"""Predictions of the planner beside measurements."""

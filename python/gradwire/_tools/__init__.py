"""The command `gradwire`: run, bench, tune, doctor and schedule."""

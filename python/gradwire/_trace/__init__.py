"""Traces: what ranks record, parts of them, clocks, and the file for Perfetto."""

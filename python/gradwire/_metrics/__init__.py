"""What this process's ranks count, as Prometheus text, at a port or in a file."""

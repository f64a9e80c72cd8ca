"""Communicators of ranks that can exchange bytes already: those of another, or a process group."""

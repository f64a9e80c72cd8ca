"""The engine of all trainers: what travels, in which codec, and whether a step counts."""

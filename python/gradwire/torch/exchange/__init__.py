"""The engine of trainers that average: what travels, in which codec, and whether a step counts."""

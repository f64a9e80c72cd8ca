"""Trainings of small networks to be compared: by optimizer, exchange, batch and learning rate."""

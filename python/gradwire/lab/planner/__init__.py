"""Predictions before a run: volumes of layers, times of training steps, and advice."""

"""Predictions, measurements and drawings: what studies training, and no training needs."""

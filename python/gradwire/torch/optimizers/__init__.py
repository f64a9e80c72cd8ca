"""Optimizers that exchange in `step()` what may be compressed: momenta, not gradients."""

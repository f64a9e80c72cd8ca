"""Optimizers that exchange in `step()` what may be compressed: momenta, signs, not gradients."""

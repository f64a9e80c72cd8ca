"""Local SGD: its losses, whether exchanges hide behind training, what coming and going costs."""

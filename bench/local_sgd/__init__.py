"""Local SGD: whether exchanges hide behind training, and what it costs that ranks come and go."""

"""How ranks' processes are started, what they say as they end, and which failure was the first."""

"""The ranks that train together: their communicator, and that they begin and stay alike."""

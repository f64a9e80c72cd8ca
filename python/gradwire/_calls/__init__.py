"""The call of a collective: its options, request to the core, GPUs, Python codecs and Work."""

"""How a collective is called: its options, requests to the core, GPUs, Python codecs, Work."""

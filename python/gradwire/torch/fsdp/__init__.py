"""FSDP2's communication in codecs: reductions of gradients, and the gathering of parameters."""

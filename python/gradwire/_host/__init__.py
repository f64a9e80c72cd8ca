"""Facilities of this host: network interfaces, RDMA ports, GPUs, and emulated links."""

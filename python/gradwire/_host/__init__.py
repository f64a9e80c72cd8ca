"""What this host offers: its network interfaces, RDMA ports and GPUs, or links that it emulates."""

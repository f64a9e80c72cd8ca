"""Links between hosts on one machine, plain sockets over them, and RDMA beside perftest."""

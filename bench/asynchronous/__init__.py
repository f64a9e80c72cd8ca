"""Training that does not wait for all: DiLoCo, Downpour SGD and Sandblaster L-BFGS."""

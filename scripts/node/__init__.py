"""A real node: kubelet, containerd, NVIDIA's container runtime and plugins, and GPUs from a mock of NVML.

`build` makes the programs, `real` runs a node, `python -m scripts.node` is the command of `make node`.
"""

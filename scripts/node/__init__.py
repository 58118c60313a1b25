"""A real node: kubelet, containerd, NVIDIA's container runtime and plugins, and GPUs from a mock of NVML.

`build` builds the programs, `real` runs a node, and `make node` runs `python -m scripts.node`.
"""

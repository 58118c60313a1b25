"""A real Kubernetes control plane on loopback: etcd, API server, scheduler, controllers, and kwok instead of kubelets.

`build` builds the binaries, `cluster` runs them, and `make cluster` runs `python -m scripts.controlplane`.
"""

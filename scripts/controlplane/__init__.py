"""A real Kubernetes control plane on loopback: etcd, API server, scheduler, controllers, and kwok instead of kubelets.

`build` makes the binaries, `cluster` runs them, `python -m scripts.controlplane` is the command of `make cluster`.
"""

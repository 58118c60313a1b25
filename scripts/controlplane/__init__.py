"""A real Kubernetes control plane on loopback: etcd, API server, scheduler, controllers, and kwok for the kubelets.

`build` makes the binaries, `cluster` runs them, `python -m scripts.controlplane` is the command of `make cluster`.
"""

"""The pinned version of kubeconform."""

"""Where kubeconform is built from."""

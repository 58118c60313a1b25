"""What only a real kubelet, a real container runtime and real containers can show."""

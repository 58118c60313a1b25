"""Tests that need a real kubelet, a real container runtime and real containers."""

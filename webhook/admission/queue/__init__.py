"""Pods that wait for GPUs behind a scheduling gate."""

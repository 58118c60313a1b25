"""Tests of Dynamic Resource Allocation on simulated nodes."""

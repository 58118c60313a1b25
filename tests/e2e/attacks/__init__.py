"""Attacks on a real control plane. Each module is one row of docs/threat-model.md."""

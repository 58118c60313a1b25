"""Attacks on a real control plane. Each module is one row of docs/explanation/threat-model.md."""

"""The decision, on plain values: no I/O, no clock, no await."""

"""The decision: plain values in, plain values out. No I/O, no clock, no await."""

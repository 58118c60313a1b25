"""The process: settings, clock, log, metrics."""

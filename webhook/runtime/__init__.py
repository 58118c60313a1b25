"""Settings, clock, logging, metrics, HTTP listeners and certificates."""

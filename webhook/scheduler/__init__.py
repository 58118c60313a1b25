"""The answers to schedulers, and the wake-ups of pods that wait for one."""

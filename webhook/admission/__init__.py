"""The admission of a pod, from its review to its binding, and what happens when evidence ends."""

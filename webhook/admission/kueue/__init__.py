"""Answers to admission checks of Kueue: whether the pods of a Workload can have proven GPUs."""

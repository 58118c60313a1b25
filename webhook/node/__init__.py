"""What runs on a node: the agent that proves it."""

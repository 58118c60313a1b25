"""What runs on a node: the agent that attests it."""

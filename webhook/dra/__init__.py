"""Dynamic Resource Allocation: proof devices for GPUs with evidence, and the claims that use them."""

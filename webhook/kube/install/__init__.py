"""What an installer applies: custom resource definitions, policies, roles, webhook configurations."""

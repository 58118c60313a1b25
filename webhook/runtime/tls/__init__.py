"""TLS certificates: loading, issuing and rotation."""

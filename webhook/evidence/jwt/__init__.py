"""Nodes that prove themselves with a JWT-SVID."""

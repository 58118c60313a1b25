"""Evidence from nodes that prove themselves with a JWT-SVID."""

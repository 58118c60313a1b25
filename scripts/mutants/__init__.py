"""Planted bugs: the tests have to find each of them."""

"""Fuzzes every route of a real server and every parser of untrusted input, starting from a corpus."""

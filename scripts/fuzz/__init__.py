"""Fuzzes every route of a real server and every parser of untrusted input, from a kept corpus."""

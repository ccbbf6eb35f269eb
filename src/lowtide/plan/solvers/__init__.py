"""Solvers, one algorithm a file."""

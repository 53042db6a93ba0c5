"""Benchmarks of other projects, as environments."""

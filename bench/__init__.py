"""Benchmarks, run through ``kvtier bench``."""

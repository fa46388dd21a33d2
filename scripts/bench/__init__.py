"""Benchmarks: `python -m scripts.bench` lists them, `python -m scripts.bench NAME` runs one."""

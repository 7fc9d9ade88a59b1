"""Parts of ``scripts/bench_growth.py``."""

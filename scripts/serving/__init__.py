"""Serving benchmarks of the real engine on cards: models, servers, loads and what they are measured by."""

"""Builds the bare driver loop with the C++ compiler that builds the package."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("bare.cpp")


def build(folder: str) -> str:
    """Compile ``bare.cpp`` into ``folder``; returns the library's path."""
    library = str(Path(folder) / "bare.so")
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-std=c++20", "-O2", "-fPIC", "-shared", str(SOURCE), "-o", library, "-ldl"], check=True)
    return library

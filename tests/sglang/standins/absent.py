"""Packages that the engine imports and that a machine without a card does not have.

Every name exists and every submodule can be imported; using one of them fails with its name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _Names(type):
    """Attributes of an absent name are absent names, so that enumerations can be spelt."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")


def absent(name: str) -> Any:
    """A class that cannot be made."""

    def refuse(self: object, *_: object, **__: object) -> None:
        raise NotImplementedError(f"{name} is not there on this machine")

    return _Names(name, (), {"__init__": refuse})


def names_of(package: str) -> Callable[[str], Any]:
    """``__getattr__`` of an absent package or of one of its modules."""

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{package}.{name}")

    return lookup


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = names_of(module.__name__)  # type: ignore[method-assign]


def stand_in(package: str) -> Callable[[str], Any]:
    """Make every submodule of ``package`` importable; returns its ``__getattr__``."""
    sys.meta_path.append(_Submodules(package))
    return names_of(package)

"""A device that answers late, on the host: its numbers arrive when the test says so."""

from __future__ import annotations

import torch

from kvcached_dist.sglang.census import Ids


class Late:
    """Makes copies that arrive together at :meth:`pass_time`; as a device, they hold what was true when they began."""

    def __init__(self) -> None:
        self._waiting: list[LateCopy] = []

    def __call__(self, numbers: torch.Tensor) -> LateCopy:
        """Start a copy."""
        made = LateCopy(numbers.clone())
        self._waiting.append(made)
        return made

    def pass_time(self) -> None:
        """Everything that was started has arrived."""
        for copy in self._waiting:
            copy.here = True
        self._waiting.clear()


class LateCopy:
    """One of them."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        self.here = False

    def arrived(self) -> bool:
        return self.here

    def numbers(self) -> Ids:
        assert self.here, "read before it has arrived: on a device this would have waited"
        return self._numbers.numpy()

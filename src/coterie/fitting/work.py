"""Where a fit reports its progress, and where it keeps its finished parts."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

#: Called with what is being done, how many steps are done, of how many, and a text.
FitProgress = Callable[[str, int, int, str], None]
#: Finished parts of a fit by name: arrays, numbers and texts only.
FinishedParts = MutableMapping[str, Any]


@dataclass(frozen=True, eq=False)
class Work:
    """Where a fit reports its progress, and where it keeps its finished parts.

    Parameters
    ----------
    report : called with the progress.
    parts : the finished parts.
    prefix : tells the parts of one plan from those of another.
    """

    report: FitProgress = lambda *_: None
    parts: FinishedParts = field(default_factory=dict)
    prefix: str = ""

    def show(self, what: str, done: int = 0, total: int = 1, text: str = "") -> None:
        """Report what is being done."""
        self.report(self.prefix + what, done, total, text)

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The part of this name; computed and kept if it is not there yet."""
        if self.prefix + name not in self.parts:
            self.keep(name, compute())
        return self.parts[self.prefix + name]

    def keep(self, name: str, value: Any) -> None:
        """Keep a part."""
        self.parts[self.prefix + name] = value

    def get(self, name: str, default: Any = None) -> Any:
        """A part, or the default."""
        return self.parts.get(self.prefix + name, default)

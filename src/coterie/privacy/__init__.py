"""What a release costs, how it is made, and what can be learned from it."""

from typing import Any

#: Taken from their modules when they are asked for: attacks simulate federations, which import this package.
_NAMES = {"Audit": "auditing", "Finding": "auditing", "audit": "auditing", "EpsilonBound": "lower_bound",
          "epsilon_lower_bound": "lower_bound"}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        from importlib import import_module

        return getattr(import_module(f"coterie.privacy.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'coterie.privacy' has no attribute {name!r}")


__all__ = ["Audit", "EpsilonBound", "Finding", "audit", "epsilon_lower_bound"]

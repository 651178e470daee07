"""A data function of nodes that misbehave when told to: `switch` in the node's configuration names a file saying how.

The file is read anew for every message, as is this module: each message is answered in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.users import Users
from coterie.federated import sources
from coterie.federated.client import join
from coterie.federated.protocol.messages import Reply


def load(config: Mapping[str, Any]) -> Users:
    """The users of an .npz file, and what the lines of the switch say: damaged, nan, twin FILE, slow SECONDS (once)."""
    users, switch = sources.npz(config), Path(str(config["switch"]))
    lines = switch.read_text().splitlines() if switch.exists() else []
    honest = Reply.encode
    for word, _, rest in (line.partition(" ") for line in lines):
        if word == "damaged":
            Reply.encode = lambda reply: honest(reply)[:-9] + b"\xff" * 9  # type: ignore[method-assign]
        elif word == "nan":
            Reply.encode = lambda reply: honest(replace(  # type: ignore[method-assign]
                reply, arrays={name: np.full_like(array, np.nan) for name, array in reply.arrays.items()}))
        elif word == "twin":  # says it holds all users of another node's file as well
            users = join([users, sources.npz({"path": rest})])
        elif word == "slow" and "agreement" in config:  # not when it is only asked who is there
            switch.write_text("\n".join(line for line in lines if not line.startswith("slow")))
            time.sleep(float(rest))
    return users

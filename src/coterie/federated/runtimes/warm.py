"""Flower's own programs with less waiting, for nodes and servers that coterie starts.

    python -m coterie.federated.runtimes.warm flower-supernode ...

A SuperNode starts a process for every message, which imports for about two seconds of processor
time before it looks at the message. Here the program that starts them has imported everything once
and copies itself (`os.fork`). And a SuperNode that hears nothing asks again after three seconds,
which every round waits for; here it does so the sooner, the more recent its last message is.
What is sent, and what the processes do, is Flower's: a part that another version of Flower does not
have is left as it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from coterie.base.storage import private_folder

#: The module to start with `python -m`.
WARM = "coterie.federated.runtimes.warm"
_PROGRAMS = {"flower-supernode": ("flwr.supernode.cli", "flower_supernode"),
             "flower-superexec": ("flwr.supercore.cli", "flower_superexec"),
             "flwr-clientapp": ("flwr.supernode.cli", "flwr_clientapp"),
             "flwr-serverapp": ("flwr.superlink.cli", "flwr_serverapp")}
_SOON = 0.2  # seconds between two looks at least


def environment(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Variables with which Flower's programs start those of this module.

    Parameters
    ----------
    folder : gets a program that is found before Flower's of the same name.
    env : of the programs.
    """
    file = private_folder(folder) / "flower-superexec"
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {WARM} flower-superexec "$@"\n')
    file.chmod(0o700)
    return {**env, "PATH": f"{folder}{os.pathsep}{env.get('PATH', '')}"}


class _Clock:
    """The module `time` for a loop of Flower's: the longer nothing happens, the longer it sleeps.

        seconds = min(Flower's, max(a fifth, share * seconds since something happened))
    """

    def __init__(self, share: float) -> None:
        self.share, self.busy = share, -float("inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """A SuperNode sleeps 3 s where there is no message, and half a second until one is
        answered.
        """
        if seconds < 1:
            self.busy = time.monotonic()
        time.sleep(min(seconds, max(_SOON, self.share * (time.monotonic() - self.busy))))


def _start(program: str) -> None:
    module, name = _PROGRAMS[program]
    getattr(import_module(module), name)()


def _patient() -> None:
    """A SuperNode that looks again soon."""
    with contextlib.suppress(ImportError):
        import_module("flwr.supernode.start_client_internal").__dict__["time"] = _Clock(0.25)


def _forking() -> None:
    """A SuperExec that copies itself instead of starting a program."""
    try:
        loop = import_module("flwr.supercore.superexec.run_superexec")
        plain = import_module("flwr.supercore.superexec.executor.subprocess_executor")
        types = import_module("flwr.supercore.superexec.executor.types")
        commands = import_module("flwr.supercore.constant").TASK_TYPE_TO_COMMAND
        usual, accepted = plain.SubprocessExecutor, types.LaunchResult.accepted
    except (ImportError, AttributeError):  # another Flower
        return
    for module, _ in (_PROGRAMS["flwr-clientapp"], _PROGRAMS["flwr-serverapp"]):
        import_module(module)
    import_module("coterie.federated.flower")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that ended

    loop.__dict__["time"] = clock = _Clock(0.05)

    class Forking(usual):  # type: ignore[misc, valid-type]
        def launch(self, spec: Any) -> Any:
            program = commands[spec.task_type]
            if program not in _PROGRAMS or spec.runtime_dependency_install:
                return super().launch(spec)
            words = [program, "--runtime-api-address", spec.runtime_api_address,
                     "--token", spec.token, "--parent-pid", str(os.getpid())]
            words += ["--insecure"] if spec.insecure else (
                ["--root-certificates", spec.root_certificates_path]
                if spec.root_certificates_path else [])
            if not os.fork():
                _child(words)
            clock.busy = time.monotonic()
            return accepted()

    loop.__dict__["get_executor"] = lambda *words, **options: Forking()


def _child(words: list[str]) -> None:
    """The work of a copy, which ends with it."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with contextlib.suppress(ImportError, AttributeError):  # of the one that was copied
            import_module("flwr.supercore.exit.exit_handler").registered_exit_handlers.clear()
        sys.argv = words
        _start(words[0])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Run the program that the first argument names, with the others."""
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "flower-supernode":
        _patient()
    else:
        _forking()
    _start(sys.argv[0])


if __name__ == "__main__":
    main()

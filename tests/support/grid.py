"""A Grid of Flower in this process: server and client app talk without a network."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def someone(monkeypatch) -> None:
    """Flower lets nobody write a message outside a task."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Nodes:
    """A Grid whose nodes answer at once, in this process; `spoil` may change, lose or keep back an answer."""

    def __init__(self, configs: list[dict[str, Any]]) -> None:
        from flwr.app import Context, RecordDict

        self.make = lambda node, config: Context(run_id=1, node_id=node, node_config=config, state=RecordDict(),
                                                 run_config={})
        self.contexts = {100 + k: self.make(100 + k, config) for k, config in enumerate(configs)}
        self.replies: dict[str, Any] = {}
        self.sent: list[Any] = []
        self.pulls = 0
        self.spoil: Any = lambda node, message, answer: answer()

    def rename(self, node: int, new: int) -> None:
        """The node is started again, under a new number and without what Flower kept for it."""
        self.contexts[new] = self.make(new, self.contexts.pop(node).node_config)

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Any) -> list[str]:
        from flwr.app import Error, Message

        from coterie.federated.flower import client

        ids = []
        for message in messages:
            number, node = f"m{len(self.sent)}", message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            try:
                answer = self.spoil(node, message, lambda m=message, n=node: client(m, self.contexts[n]))
            except Exception as error:  # as Flower does
                answer = Message(Error(code=2, reason=str(error)), reply_to=message)
            if answer is not None:
                self.replies[number] = answer
            ids.append(number)
        return ids

    def pull_messages(self, ids: Any) -> list[Any]:
        self.pulls += 1
        return [self.replies.pop(number) for number in list(ids) if number in self.replies]

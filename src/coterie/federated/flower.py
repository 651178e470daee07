"""coterie as a Flower app: the same queries and replies, carried by SuperLink and SuperNodes.

`client` replies for the users of its node; `server` runs any algorithm of the protocol. Each node
gets one message with the queries for all its users, in coterie's own binary form. Users are
identified by their names, never by the node's number. Every message starts a new process at its
node; what a node does with it is in `coterie.federated.node`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coterie.base.errors import CoterieError, Incompatible, Interrupted, InvalidInput, MissingExtra

try:
    from flwr.app import ConfigRecord, Context, RecordDict
    from flwr.app import Message as Envelope
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise MissingExtra("flwr", "flower", "Running on Flower") from error

from coterie.base.storage import locked, write_atomically
from coterie.federated.agreement import Agreement, Introduction
from coterie.federated.algorithms.base import Replies
from coterie.federated.entry import describe, serve, write, writer
from coterie.federated.membership import join_run, sentences_of, write_newcomers
from coterie.federated.node import Node
from coterie.federated.protocol.messages import (
    REFUSES,
    VERSION,
    BadMessage,
    Batch,
    Message,
    decode,
    digest,
)
from coterie.federated.session import Round
from coterie.federated.settings import CONFIG, Deployment, complete, for_nodes
from coterie.federated.sources import TableReader, in_order
from coterie.output.runs import load_run

log = logging.getLogger("coterie.federated")
logger = logging.getLogger("flwr")  # what Flower shows as the run's log
_MOST = 1 << 28  # largest size of one user's reply in bytes
_EXPIRES = 10  # deadlines after which a message is given up
_SILENT = 3  # messages in a row that a node may leave to expire

client = ClientApp()
tables = TableReader()  # of all nodes that share this process
server = ServerApp()

# -- at the node
# ------------------------------------------------------------


def _simulated() -> bool:
    """Whether this process is a worker of Flower's simulation, and no node of its own."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


@client.query("users")
def _introduce(message: Envelope, context: Context) -> Envelope:
    """Who is at this node, and what it says of its data."""
    said = Node(message.content["config"], context.node_config, tables,
                simulated=_simulated()).introduce()
    return Envelope(RecordDict({"users": ConfigRecord(said)}), reply_to=message)


@client.train("answer")
def _answer(message: Envelope, context: Context) -> Envelope:
    """The replies of the users of this node."""
    node = Node(message.content["config"], context.node_config, tables, simulated=_simulated())
    answers = node.answer(message.content["queries"])
    return Envelope(RecordDict({"answers": ConfigRecord(answers.replies),
                                "refusals": ConfigRecord(answers.refusals)}), reply_to=message)


# -- at the server
# ------------------------------------------------------------


class _OneSentence(logging.Filter):
    """What coterie raises on purpose says everything: Flower's log needs no traceback of it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, CoterieError):
            record.msg, record.args, record.exc_info = "%s", (error,), None
        return True


logger.addFilter(_OneSentence())


class _Kept(logging.Handler):
    """Keeps the warnings of a run, for those who watch it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class FlowerRuntime:
    """Carries queries through Flower's Grid. A round lasts until all have replied, or `deadline`
    seconds.

    `sites` has the names of nodes by their numbers, and `status` is a file that says who is there
    and who is awaited.

    A user is at the node that was first to say so. A node that does not answer for a user of whom
    it said so loses it to the next one that says so, and is set aside with all its users.
    """

    apart = True  # nodes are of different owners

    def __init__(self, grid: Grid, config: Mapping[str, Any], *, deadline: float,
                 poll: float = 0.1, max_users: int = CONFIG["max-users"],
                 sites: Mapping[str, str] | None = None, status: Path | None = None) -> None:
        self.max_users, self.sites, self.status = max_users, sites or {}, status
        self.warned: list[str] = []
        self.grid, self.config, self.deadline, self.poll = grid, dict(config), deadline, poll
        self.agreement: Agreement | None = None
        self.home: dict[Any, int] = {}  # user -> node
        # Node -> what it said of itself, or why it cannot take part.
        self.met: dict[int, Introduction | str] = {}
        # Nodes whose introduction cannot be true, with the reason.
        self.refused: dict[Any, str] = {}
        self.asking: dict[str, int] = {}  # message -> node asked who it holds
        # Message -> node, users asked, when it was sent.
        self.pending: dict[str, tuple[int, list[int], float]] = {}
        self.silent = Counter[int]()  # node -> messages in a row that it has left to expire

    @property
    def names(self) -> tuple[Any, ...]:
        """The users of the federation, once it is agreed who they are."""
        return () if self.agreement is None else self.agreement.names

    def use(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.config |= {"agreement": agreement.to_json(), "run": agreement.run}

    def begin(self, run: str) -> None:
        assert self.agreement is not None
        self.pending = {}
        self.config["run"] = f"{self.agreement.run}-{run}"

    def identity(self) -> dict[str, str]:
        return {"users": digest(np.frombuffer(repr(self.names).encode(), np.uint8))}

    def label(self, node: int) -> str:
        """The name of a node's site."""
        return self.sites.get(str(node), f"node {node}")

    def tell(self, stage: str, **more: Any) -> None:
        """Write who is there, who is awaited and who is refused, for those who watch the run."""
        if self.status is None:
            return
        users = Counter(self.label(node) for node in self.home.values())
        gone = {self.label(node): said for node, said in self.met.items()
                if isinstance(said, str)} | {str(name): said for name, said in self.refused.items()}
        waiting = {node for node, _, _ in self.pending.values()} | set(self.asking.values())
        awaited = {self.label(node) for node in waiting}
        if not self.names:  # of a run that has not begun, everybody who is not there
            awaited |= {name for name in self.sites.values() if name not in users}
        write_atomically(self.status, json.dumps({
            "time": time.time(), "stage": stage, "users": users, "refused": gone,
            "awaited": sorted(awaited - gone.keys()), "warnings": self.warned,
            **more}).encode())

    # who is there

    def meet(self) -> None:
        """Ask nodes not met before who they hold, and wait for that once; drop those that are gone.
        """
        live = set(self.grid.get_node_ids())
        self.met = {node: said for node, said in self.met.items() if node in live}
        self.asking = {number: node for number, node in self.asking.items() if node in live}
        new = sorted(live - self.met.keys() - set(self.asking.values()))
        envelopes = [Envelope(RecordDict({"config": ConfigRecord(self.config)}), node,
                              "query.users", ttl=_EXPIRES * self.deadline) for node in new]
        ids = list(self.grid.push_messages(envelopes)) if envelopes else []
        self.asking |= {number: node for number, node in zip(ids, new, strict=True) if number}
        end = time.monotonic() + self.deadline
        while True:  # a node that does not say it in time is heard of in a later round
            for envelope in self._pulled(self.asking) if self.asking else ():
                node = self.asking.pop(envelope.metadata.reply_to_message_id, None)
                if node is not None and not envelope.has_error():
                    self._welcome(node, envelope)
            if not self.asking.keys() & set(ids) or time.monotonic() > end:
                break
            time.sleep(self.poll)
        self.home = {}
        for node, said in self.met.items():  # in the order they came: the first holds the user
            for name in () if isinstance(said, str) else said.names:
                self.home.setdefault(name, node)

    def _welcome(self, node: int, envelope: Envelope) -> None:
        """Note what a node says of itself."""
        said = (dict(envelope.content["users"]) if "users" in envelope.content
                else {"error": "it sent no introduction"})
        introduction: Introduction | str
        if "error" in said:
            introduction = _printable(said["error"])
        elif said.get("version") != VERSION:
            introduction = (f"it speaks version {_printable(said.get('version'))} of the protocol, "
                            f"the server {VERSION}")
        else:
            try:
                introduction = Introduction.from_json(str(said.get("introduction")))
            except InvalidInput as error:
                introduction = self.refused[self.label(node)] = _printable(error)
        if not isinstance(introduction, str) and len(introduction.names) > self.max_users:
            introduction = self.refused[self.label(node)] = (
                f"it says it holds {len(introduction.names):,} users, and a node may hold "
                f"{self.max_users:,} (max-users)")
        holders = {name: other for name, other in self.home.items() if other in self.met}
        self.met[node] = introduction
        if isinstance(introduction, str):
            log.warning("%s cannot take part: %s", self.label(node), introduction)
            return
        for name in introduction.names:
            if holders.setdefault(name, node) != node:
                log.warning("%s says it holds user %r, who is at %s already: refused",
                            self.label(node), name, self.label(holders[name]))
            self.home.setdefault(name, node)

    def _pulled(self, ids: Iterable[str]) -> list[Envelope]:
        return list(self.grid.pull_messages(list(ids)))

    # a round

    def exchange(self, queries: Batch) -> Replies:
        self.meet()
        end = time.monotonic() + self.deadline
        while (len(queries) and not any(self.names[k] in self.home for k in queries.users)
               and time.monotonic() < end):
            time.sleep(max(self.poll, 0.5))  # no node is available: wait for one
            self.meet()
        by_node: dict[int, list[int]] = {}
        for k in queries.users.tolist():
            if self.names[k] in self.home:
                by_node.setdefault(self.home[self.names[k]], []).append(k)
        nodes = sorted(by_node)
        envelopes = [self._envelope(node, by_node[node], queries) for node in nodes]
        ids = list(self.grid.push_messages(envelopes)) if envelopes else []
        for number, node in zip(ids, nodes, strict=True):
            if number:
                self.pending[number] = node, by_node[node], time.monotonic()
        singles: list[tuple[int, Message]] = []
        refused: list[tuple[int, str]] = []
        fresh = set(ids) & self.pending.keys()
        # No new node is asked: wait for one of the others.
        outstanding = 0 if fresh else len(self.pending)
        shown = -1
        while True:
            if shown != len(self.pending):
                shown = len(self.pending)
                self.tell(f"round {queries.round} ({queries.kind})", round=queries.round)
            for envelope in self._pulled(self.pending) if self.pending else ():
                asked = self.pending.pop(envelope.metadata.reply_to_message_id, None)
                if asked is not None:
                    self.silent[asked[0]] = 0
                if asked is not None and not envelope.has_error():
                    self._open(envelope, asked[0], asked[1], singles, refused)
                elif asked is not None:
                    log.info("%s did not answer: %s", self.label(asked[0]),
                             envelope.error.reason or envelope.error.code)
            if time.monotonic() > end or (not fresh & self.pending.keys() and
                                          (not outstanding or len(self.pending) < outstanding)):
                break
            time.sleep(self.poll)
        live = set(self.grid.get_node_ids()) if self.pending else set()
        self.pending = {number: asked for number, asked in self.pending.items() if asked[0] in live}
        self._give_up(len(live), refused)
        waiting = tuple(k for _, users, _ in self.pending.values() for k in users)
        return Replies(singles=tuple(singles), waiting=waiting, refused=tuple(refused))

    def _give_up(self, live: int, refused: list[tuple[int, str]]) -> None:
        """Ask again where a message has expired; a node that lets several expire is set aside, and
        at once if another one says it holds its users. Where most are silent, the network is.
        """
        for number, (node, users, sent) in list(self.pending.items()):
            if time.monotonic() < sent + _EXPIRES * self.deadline:
                continue
            del self.pending[number]
            self.silent[node] += 1
            few = 2 * sum(many > 0 for many in self.silent.values()) < live
            if self._claimed(node, users) or (few and self.silent[node] >= _SILENT):
                self._disown(node, users, users, refused)

    def _envelope(self, node: int, users: list[int], queries: Batch) -> Envelope:
        asked = {json.dumps(self.names[k]): queries[k].encode() for k in users}
        content = RecordDict({"config": ConfigRecord(self.config), "queries": ConfigRecord(asked)})
        return Envelope(content, node, "train.answer", ttl=_EXPIRES * self.deadline,
                        group_id=str(queries.round))

    def _open(self, envelope: Envelope, node: int, users: list[int],
              singles: list[tuple[int, Message]], refused: list[tuple[int, str]]) -> None:
        """The replies in an envelope, only of users who were asked in it, and what their node
        refuses.
        """
        answers, refusals = envelope.content.get("answers", {}), envelope.content.get("refusals",
            {})
        strange = [k for k in users if isinstance(answers, Mapping) and isinstance(
            refusals, Mapping) and json.dumps(self.names[k]) not in {*answers, *refusals}]
        if strange:
            self._disown(node, users, strange, refused)
            return
        for k in users:
            reason = (refusals.get(json.dumps(self.names[k])) if isinstance(refusals, Mapping)
                      else None)
            if reason is not None:
                refused.append((k, f"{REFUSES}{_printable(reason)}"))
                continue
            data = answers.get(json.dumps(self.names[k])) if isinstance(answers, Mapping) else None
            if data is None:
                continue
            try:
                if not isinstance(data, bytes):
                    raise BadMessage(f"it is a {type(data).__name__}, not bytes")
                reply = decode(data, _MOST)
            except BadMessage as error:
                refused.append((k, str(error).rstrip(".")))
                continue
            singles.append((k, reply))

    def _disown(self, node: int, users: list[int], strange: list[int],
                refused: list[tuple[int, str]]) -> None:
        """Set a node aside that said it holds users for whom it does not answer; those of its users
        whom another node holds are there from now on.
        """
        reason = (f"its node says it holds user {self.names[strange[0]]!r}, and does not answer "
                  "for it")
        log.warning("%s is set aside: %s", self.label(node), reason)
        self.met[node] = self.refused[self.label(node)] = reason
        others = self._claimed(node, users)
        refused += [(k, f"{REFUSES}{reason}") for k in users if k not in others]

    def _claimed(self, node: int, users: list[int]) -> list[int]:
        """Those of a node's users whom another node says it holds, too."""
        names = {name for other, said in self.met.items() if other != node
                 and not isinstance(said, str) for name in said.names}
        return [k for k in users if self.names[k] in names]

    def snapshot(self) -> dict[str, Any]:
        return {}

    def restore(self, saved: dict[str, Any]) -> None:
        """Nodes remember nothing between rounds."""

    # the start

    def gather(self, n_users: int, wait: float) -> list[tuple[str, Introduction]]:
        end, expected = time.monotonic() + wait, max(n_users, 1)
        self.meet()
        while len(self.home) < expected and time.monotonic() < end:
            self.tell(f"{len(self.home)} of {expected} users are here")
            time.sleep(0.5)
            self.meet()
        # Who lies about itself keeps nobody from learning.
        if 0 < len(self.home) < expected and self.refused:
            log.warning("%d of %d users came, and %d node(s) were refused: the others begin",
                        len(self.home), expected, len(self.refused))
        elif len(self.home) < expected:
            errors = "; ".join(sorted({
                f"{self.sites[str(node)]}: {said}" if str(node) in self.sites else said
                for node, said in self.met.items() if isinstance(said, str)}))
            away = sorted(set(self.sites.values()) - {self.label(node) for node in self.met})
            raise Incompatible(f"{len(self.home)} of {expected} users came within {wait:g} s. "
                               "Start the other nodes"
                               f"{' (' + ', '.join(away) + ')' if away else ''}, "
                               f"or lower `n-users`.{' Nodes said: ' + errors if errors else ''}")
        first: dict[int, Any] = {}  # the first user of each node, which names and orders the nodes
        for name in in_order(self.home):
            first.setdefault(self.home[name], name)
        return [(self.sites.get(str(node), f"the node of user {name!r}"), said)
                for node, name in first.items() if not isinstance(said := self.met[node], str)]


def _printable(text: Any) -> str:
    """A short text of a node, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:300]).rstrip(
        ".")


@server.main()
def _main(grid: Grid, context: Context) -> None:
    """A complete run: wait for the users, run the algorithm, prove the result, write the run
    folder.
    """
    given = dict(context.run_config)
    deployment = Deployment.of(given)
    kept = _Kept()
    log.parent = logger  # so that they are in the log of the run, too
    log.addHandler(kept)
    try:
        with locked(deployment.out):
            _run(grid, given, deployment, kept.texts)
    finally:
        log.removeHandler(kept)


def _run(grid: Grid, given: dict[str, Any], deployment: Deployment, warned: list[str]) -> None:
    """The run, in a folder that is held for it."""
    out = Path(deployment.out)
    # Of an earlier start.
    for name in ("joined.csv" if deployment.join else "run.json", "error.txt"):
        (out / name).unlink(missing_ok=True)
    try:
        writers = [writer(f"jsonl:{out / 'rounds.jsonl'}"),
                   *map(writer, deployment.metrics.split())]

        def progress(line: Round) -> None:
            for enter in writers:
                enter(line)
            logger.info("%s", line)

        runtime = FlowerRuntime(grid, for_nodes(given), deadline=deployment.round_timeout,
                                poll=deployment.poll, max_users=deployment.max_users,
                                sites=_sites(deployment.sites), status=out / "status.json")
        runtime.warned = warned
        if deployment.join:
            run = load_run(deployment.join)
            newcomers = join_run(runtime, run, wait=deployment.wait, progress=progress)
            write_newcomers(newcomers, run, out / "joined.csv")
            for sentence in sentences_of(newcomers.groups.tolist()):
                logger.info("%s", sentence)
            logger.info("They are in %s.", out / "joined.csv")
            runtime.tell("done")
            return
        found = serve(runtime, deployment, progress)
    except CoterieError as error:
        write_atomically(out / "error.txt", str(error).encode())
        raise  # Flower logs it
    except Interrupted as stop:  # Flower is stopping; submitted again, the run continues
        logger.info("%s", stop.best if stop.best is not None else stop)
        return
    write(found, out, complete(given))
    runtime.tell("done")
    logger.info("%s", describe(found))


def _sites(file: str) -> dict[str, str]:
    """The names of sites by the numbers of their nodes, as `coterie federate start` keeps them."""
    if not file:
        return {}
    return {str(site["node"]): name for name, site in json.loads(Path(file).read_text()).items()}

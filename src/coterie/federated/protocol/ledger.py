"""What was sent: numbers and bytes, up and down, by field, by round and by user."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from coterie.base.types import Ints
from coterie.federated.protocol.messages import FRAME, Batch, Message, field_size


class Entry(NamedTuple):
    """One field of one round's messages in one direction. What is broadcast counts once."""

    round: int
    kind: str  # of the query
    direction: str  # "up", to the server, or "down"
    field: str
    messages: int
    numbers: int
    bytes: int


class Ledger:
    """An account of everything that was sent between the server and the users, in the sizes of the
    binary form.

    A broadcast counts once in the entries, as in the paper, and for no user.

    Parameters
    ----------
    n_users : of the federation.

    Attributes
    ----------
    entries : one line for every field of every round.
    per_user : (direction, field) -> (n_users, 2) numbers and bytes of each user's own part.

    Example
    -------
    >>> from coterie.federated.protocol.messages import Query
    >>> ledger = Ledger(2)
    >>> ledger.record_one(0, Query("gradient", 0, {"model": np.zeros(3)}), 0)
    >>> ledger.numbers_up
    3
    """

    def __init__(self, n_users: int) -> None:
        self.n_users = n_users
        self.entries: list[Entry] = []
        # (direction, field) -> (n_users, 2) numbers and bytes.
        self.per_user: dict[tuple[str, str], Ints] = {}

    def record(self, batch: Batch, direction: str, turn: int) -> None:
        """Enter a batch of messages.

        Parameters
        ----------
        batch : the messages.
        direction : "up" or "down".
        turn : the number of the round.
        """
        for name, numbers, size, shared, shared_size in batch.traffic() if len(batch) else ():
            total, weight = int(numbers.sum()) + shared, int(size.sum()) + shared_size
            if weight:
                self.entries.append(Entry(turn, batch.kind, direction, name, len(batch), total,
                                          weight))
                np.add.at(self._account(direction, name), batch.users,
                          np.stack([numbers, size], axis=1))

    def _account(self, direction: str, name: str) -> Ints:
        return self.per_user.setdefault((direction, name),
                                        np.zeros((self.n_users, 2), dtype=np.int64))

    def record_one(self, user: int, message: Message, turn: int) -> None:
        """Enter a single reply, valid or not.

        Parameters
        ----------
        user : the position of its sender; others than users are not counted by user.
        message : the reply.
        turn : the number of the round.
        """
        rows = [(name, array.size, field_size(array.shape, array.dtype))
                for name, array in message.arrays.items()]
        for name, numbers, size in [*rows, ("frame", 0, FRAME)]:
            self.entries.append(Entry(turn, message.kind, "up", name, 1, numbers, size))
            if 0 <= user < self.n_users:
                self._account("up", name)[user] += (numbers, size)

    def record_round(self, queries: Batch, replies: Iterable[Batch],
                     singles: Iterable[tuple[int, Message]],
                     ) -> tuple[list[Entry], int, int]:
        """Enter a round: queries down, replies up.

        Parameters
        ----------
        queries : what was asked.
        replies, singles : what came back, in batches and one by one with the sender's position.

        Returns
        -------
        The entries of the round, its bytes up and its bytes down.
        """
        first, turn = len(self.entries), queries.round
        self.record(queries, "down", turn)
        for batch in replies:
            self.record(batch, "up", turn)
        for user, message in singles:
            self.record_one(user, message, turn)
        entries = self.entries[first:]
        up, down = (sum(entry.bytes for entry in entries if entry.direction == way)
                    for way in ("up", "down"))
        return entries, up, down

    def total(self, what: str = "bytes", *, direction: str | None = None, kind: str | None = None,
              field: str | None = None, round: int | None = None) -> int:
        """The sum over all entries that match.

        Parameters
        ----------
        what : "bytes" or "numbers".
        direction : "up" or "down"; both if omitted.
        kind, field, round : of the message; all if omitted.

        Returns
        -------
        The sum.

        Example
        -------
        >>> import coterie as ct
        >>> ledger = ct.federate(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
        ...                      lam=1.0).ledger
        >>> ledger.total() == ledger.total(direction="up") + ledger.total(direction="down")
        True
        """
        return sum(getattr(entry, what) for entry in self.entries
                   if direction in (None, entry.direction) and kind in (None, entry.kind)
                   and field in (None, entry.field) and round in (None, entry.round))

    def by(self, key: str, what: str = "bytes") -> dict[tuple[Any, str], int]:
        """Sums for each value of a key, and direction.

        Parameters
        ----------
        key : "round", "kind" or "field".
        what : "bytes" or "numbers".

        Returns
        -------
        The sums, by value and direction.

        Example
        -------
        >>> import coterie as ct
        >>> ledger = ct.federate(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
        ...                      lam=1.0).ledger
        >>> sum(ledger.by("round").values()) == ledger.bytes
        True
        """
        sums: dict[tuple[Any, str], int] = {}
        for entry in self.entries:
            group = (getattr(entry, key), entry.direction)
            sums[group] = sums.get(group, 0) + getattr(entry, what)
        return sums

    def user(self, number: int) -> dict[tuple[str, str], tuple[int, int]]:
        """Numbers and bytes of one user.

        Parameters
        ----------
        number : the position of the user among those of the federation.

        Returns
        -------
        The two, by direction and field.

        Example
        -------
        >>> import coterie as ct
        >>> ledger = ct.federate(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
        ...                      lam=1.0).ledger
        >>> sizes = [size for (way, _), (_, size) in ledger.user(0).items() if way == "up"]
        >>> sum(sizes) - ledger.bytes_of_users("up")[0]
        np.int64(0)
        """
        return {key: (int(account[number, 0]), int(account[number, 1])) for key,
                account in self.per_user.items()}

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Bytes for each kind of question.

        Returns
        -------
        The bytes "up" and "down", by kind.

        Example
        -------
        >>> import coterie as ct
        >>> ledger = ct.federate(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
        ...                      lam=1.0).ledger
        >>> sum(sum(sizes.values()) for sizes in ledger.by_kind().values()) == ledger.bytes
        True
        """
        kinds: dict[str, dict[str, int]] = {}
        for (kind, way), size in self.by("kind").items():
            kinds.setdefault(kind, {"up": 0, "down": 0})[way] = size
        return kinds

    def bytes_of_users(self, direction: str) -> Ints:
        """Bytes of each user's own part in one direction.

        Parameters
        ----------
        direction : "up" or "down".

        Returns
        -------
        (n_users,) the bytes.

        Example
        -------
        >>> import coterie as ct
        >>> ledger = ct.federate(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
        ...                      lam=1.0).ledger
        >>> ledger.bytes_of_users("up").shape
        (3,)
        """
        return sum((account[:, 1] for (way, _),
                    account in self.per_user.items() if way == direction),
                   np.zeros(self.n_users, dtype=np.int64))

    def participants(self) -> int:
        """The number of users who sent something.

        Returns
        -------
        The number.

        Example
        -------
        >>> import coterie as ct
        >>> ledger = ct.federate(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
        ...                      lam=1.0).ledger
        >>> ledger.participants()
        3
        """
        return int((self.bytes_of_users("up") > 0).sum())

    @property
    def bytes_up(self) -> int:
        """Bytes from the users to the server."""
        return self.total(direction="up")

    @property
    def bytes_down(self) -> int:
        """Bytes from the server to the users."""
        return self.total(direction="down")

    @property
    def numbers_up(self) -> int:
        """Numbers from the users to the server."""
        return self.total("numbers", direction="up")

    @property
    def numbers_down(self) -> int:
        """Numbers from the server to the users."""
        return self.total("numbers", direction="down")

    @property
    def bytes(self) -> int:
        """Bytes in both directions."""
        return self.bytes_up + self.bytes_down

    def __str__(self) -> str:
        return (f"{self.bytes_up:,} bytes up and {self.bytes_down:,} down "
                f"({self.numbers_up:,} and {self.numbers_down:,} numbers)")

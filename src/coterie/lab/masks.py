"""Sums of users' numbers of which the server sees nothing but the sum: pairwise masks.

Every two users i, j share a secret that the server does not know, from which both expand the same
stream s_ij of uniform integers. User i, asked for numbers v_i together with the users of a set S,
sends (modulo 2^64)

    masked_i = round(2^k v_i) + sum_{j in S, j > i} s_ij - sum_{j in S, j < i} s_ij

The streams cancel in the sum over S, and only there: any fewer of the replies are uniform and
independent of the numbers. This is the simplest form of Bonawitz et al. (2017), without secret
shares. If users drop out, the others are asked again for a smaller set, with new streams, under
rules that keep differences of sums from giving users away:

- A user answers a question for at most two sets S and T. T is part of S, has more than half of its
  users, and lacks at least three of them. So whatever a server asks, and whomever it claims to have
  lost, it learns no more of a question than the sums over S, T and S without T, of three users at
  least each.
- The bound on the numbers and the numbers stay the same, too, in all rounds and runs that a
  `Member` lives through.

What this does not do:

- The server passes the public keys on. One that follows the protocol learns sums only; one that
  exchanges keys reads everything, unless users know each other's keys from elsewhere
  (`Member(pins=...)`): then they refuse.
- Users who work together with the server know their own part of a sum: three users are one if two
  of them do.
- A sum is not noise: it says something of the users in it. Questions that hardly differ count as
  different ones.
- Replies cannot be checked for plausibility one by one: a user who lies moves the sum by up to the
  bound, or makes it meaningless by a wrong mask, and nobody knows who it was.
- That a number is beyond the bound, so that the user refuses, is seen by the server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput, MissingExtra, Refused
from coterie.base.types import Array, Ints
from coterie.data.users import Moments, Users
from coterie.data.validation import show

Words = npt.NDArray[np.uint64]
#: What a user has answered to a question: bounds, a digest of the numbers, one or two sets.
_Answered = tuple[tuple[float, ...], bytes, tuple[frozenset[str], ...]]
#: The smallest set of users of which a sum, or a difference of two sums, may be known.
LEAST = 3
_PURPOSE = b"coterie pairwise mask, version 1"
_BITS = 62  # of a sum, so that with rounding and sign it fits into 64


@dataclass(frozen=True)
class SumQuestion:
    """What is to be summed, as all users of a sum know it.

    Parameters
    ----------
    run : name of the run.
    round : of the run.
    kind : which numbers are asked for.
    bounds : largest absolute value of each number; public, so not taken from the data.
    about : a digest of all that the numbers depend on besides the user's rows, such as a model;
        every user computes it from what it was asked, and does not take it from the server.

    Raises
    ------
    InvalidInput : a bound that is not positive and finite, or no bound.

    Example
    -------
    >>> SumQuestion(run="a", round=0, kind="count", bounds=(1000.0,)).exponents(3).tolist()
    [50]
    """

    run: str
    round: int
    kind: str
    bounds: tuple[float, ...]
    about: bytes = b""

    def __post_init__(self) -> None:
        if not self.bounds or not all(0 < bound < np.inf for bound in self.bounds):
            raise InvalidInput("a masked sum needs positive, finite bounds, got "
                               f"{show(*self.bounds)}", remedy="Give the largest absolute value "
                                                               "that a number of a user can have")

    def exponents(self, n_users: int) -> Ints:
        """(n_numbers,) the k for which numbers are rounded to multiples of 2^-k: n_users bound 2^k
        <= 2^62.
        """
        return np.asarray(_BITS - n_users.bit_length() - np.frexp(np.array(self.bounds))[1],
                          dtype=np.int64)

    def rounding(self, n_users: int) -> Array:
        """(n_numbers,) how far the sum of n_users is from the exact one: n 2^-k / 2, and the last
        digit of float64.
        """
        last = 2.0**-53 * n_users * np.array(self.bounds)
        return np.asarray(np.ldexp(float(n_users), -self.exponents(n_users) - 1) + last)

    def context(self, keys: Mapping[str, bytes]) -> bytes:
        """A digest of the question and of who takes part, by which masks differ."""
        parts = [self.run, self.round, self.kind, [float(bound).hex() for bound in self.bounds],
                 self.about.hex(), [[name, keys[name].hex()] for name in sorted(keys)]]
        return hashlib.sha256(json.dumps(parts).encode()).digest()


def encode_numbers(question: SumQuestion, values: npt.ArrayLike, n_users: int) -> Words:
    """Numbers as integers modulo 2^64: round(2^k value), negative ones as their complement.

    Parameters
    ----------
    question : with the bounds of the numbers.
    values : (n_numbers,).
    n_users : of the sum.

    Raises
    ------
    InvalidInput : numbers of another shape, not finite, or beyond the bounds. The message names no
        value.

    Example
    -------
    >>> question = SumQuestion(run="a", round=0, kind="count", bounds=(1.0,))
    >>> decode_sum(question, sum(encode_numbers(question, [v], 3) for v in (0.5, -0.25, 1.0)),
    ...            3).tolist()
    [1.25]
    """
    numbers, bounds = np.asarray(values, dtype=np.float64), np.array(question.bounds)
    if numbers.shape != bounds.shape:
        raise InvalidInput(f"the question bounds {len(bounds)} numbers, got an array of shape "
                           f"{numbers.shape}")
    beyond = np.flatnonzero(~(np.abs(numbers) <= bounds))  # also what is not a number
    if beyond.size:
        raise InvalidInput(f"{beyond.size} number(s) beyond the bound that the question declares",
                           where=f"number {beyond[0]}, bound {bounds[beyond[0]]:g}",
                           remedy="Ask with a larger bound")
    return np.rint(np.ldexp(numbers, question.exponents(n_users))).astype(np.int64).view(np.uint64)


def decode_sum(question: SumQuestion, words: Words, n_users: int) -> Array:
    """The sum as numbers, from the sum of integers modulo 2^64."""
    return np.asarray(np.ldexp(words.view(np.int64).astype(np.float64),
                               -question.exponents(n_users)))


def mask_of(name: str, secrets: Mapping[str, bytes], context: bytes, n_numbers: int) -> Words:
    """The mask of one user: streams shared with later names, minus those shared with earlier names.

    Parameters
    ----------
    name : of the user.
    secrets : 32 bytes shared with each of the others.
    context : of the question and the set (`SumQuestion.context`).
    n_numbers : how many integers.
    """
    mask = np.zeros(n_numbers, dtype=np.uint64)
    for other, secret in secrets.items():
        stream = hashlib.shake_256(_PURPOSE + secret + context).digest(8 * n_numbers)
        words = np.frombuffer(stream, dtype="<u8")
        mask = mask + words if name < other else mask - words
    return mask


class Member:
    """A user who answers for sums: its key pair, the keys of others, and what it has answered.

    Parameters
    ----------
    name : of the user.
    pins : public keys of the others, known from elsewhere; other names and keys are refused. If
        None, the first key that comes with a name is taken for that user's, which an honest server
        is trusted with.

    Attributes
    ----------
    public : 32 bytes for all others.

    Raises
    ------
    MissingExtra : the library `cryptography` is not installed.

    Example
    -------
    >>> question = SumQuestion(run="a", round=0, kind="count", bounds=(1000.0,))
    >>> members = {name: Member(name) for name in ("ann", "bob", "cem")}
    >>> keys = {name: member.public for name, member in members.items()}
    >>> replies = {name: member.answer(question, keys, [12.0]) for name, member in members.items()}
    >>> total(question, keys, replies).tolist()
    [36.0]
    """

    def __init__(self, name: str, *, pins: Mapping[str, bytes] | None = None) -> None:
        curve, _, _ = _library()
        self.name, self._fixed, self._keys = name, pins is not None, dict(pins or {})
        self._private = curve.X25519PrivateKey.generate()
        self.public: bytes = self._private.public_key().public_bytes_raw()
        self._answered: dict[tuple[str, bytes], _Answered] = {}

    def answer(self, question: SumQuestion, keys: Mapping[str, bytes],
               values: npt.ArrayLike) -> Words:
        """The masked numbers of this user.

        Parameters
        ----------
        question : what is summed.
        keys : public keys of all users of the sum, this one included.
        values : (n_numbers,) of this user.

        Returns
        -------
        (n_numbers,) integers modulo 2^64. The same question is answered by the same integers.

        Raises
        ------
        Refused : the set or a key is not acceptable, or the question was answered for other sets,
            bounds or numbers.
        InvalidInput : numbers beyond the bounds.
        """
        self._check(keys)
        digest = hashlib.sha256(np.asarray(values, dtype="<f8").tobytes()).digest()
        place = question.kind, question.about
        answered = _add_set(self._answered.get(place), question.bounds, digest, frozenset(keys))
        secrets = {other: self._secret(question.run, key)
                   for other, key in keys.items() if other != self.name}
        # Before anything is known of the numbers.
        self._answered[place] = answered
        if not self._fixed:
            self._keys.update(keys)
        words = encode_numbers(question, values, len(keys))
        return words + mask_of(self.name, secrets, question.context(keys), len(words))

    def _check(self, keys: Mapping[str, bytes]) -> None:
        """Refuse a set that is too small or in which somebody is not who it should be."""
        if keys.get(self.name) != self.public:
            raise Refused(f"the sum is without {self.name!r}, or with another public key than this "
                          "user's")
        if len(keys) < LEAST:
            raise Refused(f"a sum over {len(keys)} users says too much of each",
                          remedy=f"Ask {LEAST} users or more")
        if len(set(keys.values())) < len(keys):
            raise Refused("two users of the sum have the same public key")
        for other, key in keys.items():
            if other != self.name and (self._keys.get(other, key) != key
                                       or (self._fixed and other not in self._keys)):
                raise Refused(f"the public key of {other!r} is not the one known to {self.name!r}",
                              remedy="Find out who exchanged it: the server, or the user for a new "
                                     "key pair")

    def _secret(self, run: str, key: bytes) -> bytes:
        """32 bytes that only this user and the owner of the other key can compute."""
        curve, hashes, derivation = _library()
        try:
            shared = self._private.exchange(curve.X25519PublicKey.from_public_bytes(key))
        except ValueError as error:  # not 32 bytes, or a point with which every secret is zero
            raise Refused("a public key of the sum is not valid") from error
        info = json.dumps([run, *sorted((self.public.hex(), key.hex()))]).encode()
        return bytes(derivation.HKDF(hashes.SHA256(), 32, salt=_PURPOSE, info=info).derive(shared))


def _add_set(before: _Answered | None, bounds: tuple[float, ...], digest: bytes,
             names: frozenset[str]) -> _Answered:
    """What a user has answered with one more set, if that is allowed.

    Raises
    ------
    Refused : it is not.
    """
    if before is None:
        return bounds, digest, (names,)
    if bounds != before[0]:  # or refusals would tell how large the numbers are
        raise Refused("the question was answered with other bounds")
    # Or the difference of two sums would be that of one user's numbers.
    if digest != before[1]:
        raise Refused("the numbers have changed since the question was answered")
    sets = before[2]
    if names in sets:
        return before
    if len(sets) > 1 or not may_follow(sets[0], names):
        raise Refused("the question was answered for other users; the difference of the two sums "
                      "says too much",
                      remedy=f"Leave out {LEAST} users or more, once, and fewer than half")
    return bounds, digest, (*sets, names)


def may_follow(first: Collection[str], second: Collection[str]) -> bool:
    """Whether users who answered for the first set may answer the same question for the second.

    Example
    -------
    >>> [may_follow("abcdefgh", part) for part in ("abcde", "abcdefg", "abcd")]
    [True, False, False]
    """
    before, after = set(first), set(second)
    least = max(len(before) / 2, LEAST - 1)
    return after < before and len(before - after) >= LEAST and len(after) > least


def without(names: Collection[str], lost: Collection[str]) -> list[str]:
    """The set to ask again if some do not answer: fewer than three take others with them, the last
    by name.

    Raises
    ------
    Refused : too few would be left.

    Example
    -------
    >>> without("abcdefgh", "c")
    ['a', 'b', 'd', 'e', 'f']
    """
    left = sorted(set(names) - set(lost))
    kept = left[:min(len(left), len(set(names)) - LEAST)]
    if not may_follow(names, kept):
        raise Refused(f"{len(set(lost))} of {len(set(names))} users did not answer "
                      f"({show(*sorted(lost))}), and a sum over the others would say too much of "
                      "them", remedy="Ask the same users again")
    return kept


def total(question: SumQuestion, keys: Mapping[str, bytes], replies: Mapping[str, Words]) -> Array:
    """The sum of the numbers of all users of a set, from their masked replies.

    Parameters
    ----------
    question : that was asked.
    keys : of all users of the set.
    replies : of all of them.

    Returns
    -------
    (n_numbers,) the sum, exact up to `question.rounding(len(keys))`.

    Raises
    ------
    InvalidInput : a reply is missing, or has another form.
    """
    missing = sorted(set(keys) ^ set(replies))
    if missing:
        raise InvalidInput("masks cancel only in the sum over all users of a set",
                           where=f"users {show(*missing)}",
                           remedy="Ask again, or ask the others for a smaller set")
    wrong = [name for name, words in replies.items()
             if words.dtype != np.uint64 or words.shape != (len(question.bounds),)]
    if wrong:
        raise InvalidInput(f"expected {len(question.bounds)} integers of 64 bits",
                           where=f"users {show(*wrong)}")
    words = np.add.reduce([replies[name] for name in sorted(keys)], axis=0, dtype=np.uint64)
    return decode_sum(question, words, len(keys))


def masked_moments(users: Users, low: npt.ArrayLike, high: npt.ArrayLike, max_rows: int, *,
                   run: str = "moments", absent: Collection[str] = ()) -> Moments:
    """Moments of the rows of all users together, for `Standardizer.from_moments`; of a user alone,
    nobody sees any.

    A demonstration in one process: runs of a federation do not use it. Every user is a `Member` of
    its own and sends the number of its rows and the sums of z and z^2, where z = (feature - centre)
    / half in [-1, 1].

    Parameters
    ----------
    users : three or more.
    low, high : public bounds of all features, or (n_features,).
    max_rows : a public bound on the number of rows of a user.
    run : name of the run.
    absent : names of users who do not answer. The moments are then those of the users asked again
        (`without`).

    Returns
    -------
    Moments with a single entry, that of all rows.

    Raises
    ------
    InvalidInput : features beyond the bounds, or too many rows.
    Refused : too few users.

    Example
    -------
    >>> from coterie.datasets import ellipses
    >>> users = ellipses(seed=0).users
    >>> masked_moments(users, -100, 100, 1000).counts.tolist() == [users.n_samples]
    True
    """
    d = users.n_features
    low, high = (np.broadcast_to(np.asarray(end, dtype=np.float64), (d,)) for end in (low, high))
    centre, half = (low + high) / 2, (high - low) / 2
    if not (half > 0).all():
        raise InvalidInput("bounds need low < high for every feature")
    names = [str(name) for name in users.names]
    question = SumQuestion(run=run, round=0, kind="describe",
                           bounds=(float(max_rows),) * (1 + 2 * d))
    members = {name: Member(name) for name in names}

    def ask(chosen: Collection[str]) -> tuple[dict[str, bytes], dict[str, Words]]:
        keys, replies = {name: members[name].public for name in chosen}, {}
        for user in np.flatnonzero([name in keys and name not in absent for name in names]):
            z = (users.take([user]).features - centre) / half
            if not (np.abs(z) <= 1).all():
                raise InvalidInput("features beyond the bounds", where=f"user {names[user]!r}",
                                   remedy="Widen them")
            values = np.concatenate([[len(z)], z.sum(axis=0), (z**2).sum(axis=0)])
            replies[names[user]] = members[names[user]].answer(question, keys, values)
        return keys, replies

    keys, replies = ask(names)
    if len(replies) < len(keys):
        keys, replies = ask(without(names, set(keys) - set(replies)))
    n, sums, squares = np.split(total(question, keys, replies), [1, 1 + d])
    mean = sums / max(n[0], 1.0)
    m2 = np.maximum(squares - n[0] * mean**2, 0.0)
    return Moments(np.rint(n).astype(np.int64), (centre + half * mean)[None], (half**2 * m2)[None])


def _library() -> tuple[Any, Any, Any]:
    """X25519, hash functions and HKDF of the library `cryptography`."""
    try:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import x25519
        from cryptography.hazmat.primitives.kdf import hkdf
    except ImportError as error:
        raise MissingExtra("cryptography", "flower", "Masking sums") from error
    return x25519, hashes, hkdf

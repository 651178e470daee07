"""From the facts about a table to its recipe: what each column becomes, and what the target is.

The rules in words are those of `coterie.data.encoding`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from coterie.base.errors import InvalidInput
from coterie.data.columns import LOCAL, Column, text_key
from coterie.data.summary import (
    COUNTER,
    MOST_CLASSES,
    MOST_LEVELS,
    TASKS,
    UNNAMED,
    ColumnSummary,
    Levels,
    TableSummary,
    Task,
    leave_out,
)
from coterie.data.validation import show

ClassKind = Literal["str", "int", "float", "bool"]


class Target(NamedTuple):
    """What is to be predicted: the task, and the classes in order with their type."""

    task: Task
    classes: tuple[str, ...] = ()
    class_kind: ClassKind = "str"


class MixedCells(InvalidInput):
    """Texts in a column of numbers. Whoever has the table can say where they are."""

    def __init__(self, problem: str, column: str, remedy: str) -> None:
        super().__init__(problem, where=f"column {column!r}", remedy=remedy)
        self.column = column


def learn_target(summary: TableSummary, notes: list[str]) -> Target:
    """The task and its classes; notes say what was left out and what was inferred."""
    answers, n = summary.answers, summary.rows
    if answers is None:
        return Target("clustering")
    name, where = answers.name, f"column {answers.name!r}"
    if answers.present < n / 2:
        raise InvalidInput(f"The target is missing in {answers.missing} of {n} rows", where=where,
                           remedy="Fill it in, or delete these rows")
    if answers.missing:
        notes.append(f"{answers.missing} of {n} rows have no target ({name!r}) and are ignored.")
    as_text = _is_text(answers, summary.task)
    numbers, levels = answers.numbers, answers.levels
    if levels.distinct == 1 if as_text or numbers is None else numbers.low == numbers.high:
        only = next(iter(levels.counts), "")
        raise InvalidInput("The target has one value only, "
                           f"{show(only if as_text else text_key(only))}", where=where,
                           remedy="Name another column: --target")
    task = _task(answers, as_text) if summary.task == "auto" else summary.task
    target = Target(task)  # type: ignore[arg-type]
    if task == "classification":
        target = Target("classification", *_classes(answers, as_text))
    if summary.task == "auto":
        others = " or ".join(other for other in TASKS[:3] if other != task)
        classes = target.classes
        notes.append(f"The target {name!r} is inferred as {task}"
                     f"{f' with {len(classes)} classes ({show(*classes)})' if classes else ''}; if "
                     "it is not, "
                     f"use --task {others}.")
    return target


def _is_text(answers: ColumnSummary, task: str) -> bool:
    """Whether the target's texts are classes, though they may say numbers: not if there are too
    many of them.
    """
    if answers.kind != "number" or not answers.written or task != "auto":
        return answers.kind == "text"
    k = answers.levels.distinct
    return k <= MOST_CLASSES and k <= max(2, answers.present / 2)


def _values(answers: ColumnSummary) -> list[float]:
    """The different numbers of the target that are known: all of them unless some are pooled."""
    assert answers.numbers is not None
    known = {float({"true": "1", "false": "0"}.get(text.lower(), text))
             for text in answers.levels.counts}
    return sorted(known | ({answers.numbers.low, answers.numbers.high} if answers.levels.rare_levels
                           else set()))


def _task(answers: ColumnSummary, as_text: bool) -> Task:
    numbers = answers.numbers
    if as_text or answers.kind == "flag" or numbers is None:
        return "classification"
    k = max(len(_values(answers)), answers.levels.rare_levels)
    codes = (numbers.integers and numbers.low in (0, 1) and numbers.high - numbers.low == k - 1
             and k <= 10 and numbers.rows >= 2 * k)
    if k == 2 or codes:
        return "classification"
    return ("counts" if numbers.integers and numbers.low == 0 and numbers.mean >= numbers.median
            else "regression")


def _classes(answers: ColumnSummary, as_text: bool) -> tuple[tuple[str, ...], ClassKind]:
    """The classes of a target in order, and their type."""
    kind: ClassKind = ("str" if as_text else "bool" if answers.kind == "flag" else "int"
                       if answers.integer else "float")
    values = [] if as_text else _values(answers)
    k, n = max(len(values),
               answers.levels.distinct if as_text else answers.levels.rare_levels), answers.present
    if k > MOST_CLASSES or (kind == "str" and k > max(2, n / 2)):
        strange, n_strange = _strange(answers.levels) if as_text else ([], 0)
        if 0 < n_strange < k / 2:
            raise MixedCells(f"The target holds numbers, but also texts{_shown(strange)}",
                             answers.name, remedy="Correct or empty these cells, or name another "
                             "column: --target")
        raise InvalidInput(f"The target has {k} different values in {n} rows, too many for classes",
                           where=f"column {answers.name!r}",
                           remedy=f"Name another column, or make {MOST_CLASSES} at most"
                           + ("" if kind == "str" else ", or use --task regression"))
    if as_text:
        return tuple(sorted(answers.levels.counts)), kind
    if max(map(abs, values)) >= 2**53:
        raise InvalidInput("Classes must be integers below 2^53 or texts",
                           where=f"column {answers.name!r}", remedy="Write the classes as texts")
    types = {"bool": bool, "int": int, "float": float}
    return tuple(str(types[kind](value)) for value in values), kind


def learn_columns(summary: TableSummary, notes: list[str]) -> Iterator[Column]:
    """What becomes of each column; notes say what is not obvious."""
    said: dict[str, list[str]] = {}
    for facts in summary.columns:
        column = _column(facts, summary, said)
        if column is not None:
            yield column
    notes += [f"Column {show(*names)} is {what}." if len(names) == 1 else
              f"Columns {show(*names)} are "
              f"{what.replace('it has', 'each has').replace('it is', 'each is')}."
              for what, names in said.items()]


def _column(facts: ColumnSummary, summary: TableSummary,
            said: dict[str, list[str]]) -> Column | None:
    """What becomes of a column, None if it is dropped; what is to be said of it is added to `said`.
    """
    name, numbers, levels = facts.name, facts.numbers, facts.levels

    def note(text: str) -> None:
        said.setdefault(text, []).append(name)

    if facts.kind == "empty" or not facts.present:
        note("dropped: it is empty")
        return None
    if levels.distinct == 1 if numbers is None else numbers.low == numbers.high:
        note("dropped: it has one value wherever it has any")
        return None
    if not summary.named and _numbers_rows(facts, summary.rows):
        note("dropped: it only numbers or names the rows")
        return None
    indicator = 100 * facts.missing > facts.rows
    if facts.missing:
        several = numbers is None and levels.distinct > 2
        note("missing in some rows and "
             f"{'0 in all its columns' if several else 'filled with the mean'} there"
             + "; one more column marks them" * indicator)
    if numbers is None:
        kept, pooled = _levels(name, levels, facts.present)
        if len(kept) == 2 and not pooled:  # the second column would be 1 minus the first
            note(f"text and became one column, 0 for {kept[0]!r} and 1 for {kept[1]!r}")
            return Column(name=name, kind="category", levels=kept[1:], reference=kept[0],
                          missing=indicator, fill=levels.counts[kept[1]] / facts.present)
        note("text and became a column of 0 and 1 for each level"
             + f" of the {len(kept)} most frequent, the others pooled" * pooled)
        return Column(name=name, kind="category", levels=kept, pooled=pooled, missing=indicator)
    if facts.kind in ("date", "duration"):
        note("given in days" + " since the earliest" * (facts.kind == "date"))
    kind: Any = facts.kind
    return Column(name=name, kind=kind, fill=numbers.mean, missing=indicator,
                  origin=int(numbers.low) if facts.kind == "date" else 0)


def _levels(name: str, levels: Levels, n: int) -> tuple[tuple[str, ...], bool]:
    """The levels of a text column, and whether others are pooled; names and free text are refused.
    """
    texts, k = sorted(levels.counts), levels.distinct
    strange, n_strange = _strange(levels)
    if not n_strange:
        raise InvalidInput("Numbers must be plain (1234.5) and dates ISO (2020-12-31), got "
                           f"{show(*texts[:1]) or 'others'}", where=f"column {name!r}",
                           remedy=f"Rewrite it, or ignore it: --drop {name!r}")
    most = sorted(sorted(texts, key=lambda text: (-levels.counts[text], text))[:MOST_LEVELS])
    covered = sum(levels.counts[text] for text in most)
    if (not most
            or not (k <= max(2, n / 2) if k <= MOST_LEVELS else k <= n / 10 and covered >= n / 2)):
        if n_strange < k / 2:
            raise MixedCells(f"The column holds numbers, but also texts{_shown(strange)}", name,
                             remedy="Correct or empty these cells, or leave the column out: "
                                    f"--drop {name!r}")
        examples = f" ({show(*texts[:3])}, ...)" if texts else ""
        raise InvalidInput(f"The column has {k} different texts in {n} rows{examples}: it looks "
                           "like names or free "
                           "text", where=f"column {name!r}", remedy=leave_out(name))
    return tuple(most), k > len(most)


def _strange(levels: Levels) -> tuple[list[str], int]:
    """Texts that do not look like numbers or dates, as far as they are known, and how many there
    are.
    """
    strange = [text for text in sorted(levels.counts) if not LOCAL.fullmatch(text)]
    return strange, len(strange) + levels.rare_levels - levels.rare_local


def _shown(texts: list[str]) -> str:
    return f" ({show(*texts)})" if texts else ""


def _numbers_rows(facts: ColumnSummary, rows: int) -> bool:
    """Whether a column only numbers or names the rows."""
    order, numbers = facts.order, facts.numbers
    if numbers is None:
        return order.differ and all(count == 1 for count in facts.levels.counts.values())
    if order.numbered:
        return True
    if facts.name in UNNAMED or COUNTER.fullmatch(facts.name):
        return order.differ and numbers.high - numbers.low + 1 >= numbers.rows
    if order.rising is None or rows < 10:
        return False
    low, high, total = order.rising
    return low in (0, 1) and high - low == rows - 1 and 2 * total == rows * (low + high)

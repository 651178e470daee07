"""The page of a run: what render puts into it, and what a real browser makes of it, from disk and without a network."""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import json
import os
import re
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.browser import NASTY, Tab

import coterie as ct
from coterie.datasets import clustered, ellipses
from coterie.output.report import gather, render, write

# Documents


@cache
def solved() -> dict[str, Any]:
    """The paper's users from alone to together, as the page wants them."""
    data = ellipses(seed=0)
    problem = ct.Problem(data.users, ct.SquaredHinge(ridge=1e-3), 0.09)
    grid = ct.solve_path(problem, n_lams=24).lams
    path = ct.solve_path(problem, lams=np.unique(np.append(grid, 0.09)))
    n, test, last = data.users.n_users, data.test, path.solutions[-1]

    def accuracy(models: np.ndarray) -> list[float]:
        margin = (test.features * models[test.owner, :2]).sum(axis=1) - models[test.owner, 2]
        return (np.bincount(test.owner, np.sign(margin) == test.targets) / np.bincount(test.owner)).tolist()

    models = np.stack([s.models for s in path.solutions])
    which = [np.argsort(-np.bincount(s.labels), kind="stable")[:8].tolist() for s in path.solutions]
    return {
        "title": "Ellipses: 60 users of three kinds", "subtitle": "Squared hinge, ridge 0.001, all pairs compared",
        "version": "0.1.0", "command": "coterie demo --out demo", "task": "classification",
        "users": [str(name) for name in data.users.names], "counts": [10] * n,
        "lams": path.lams.tolist(), "chosen": int(np.argmin(abs(path.lams - 0.09))),
        "points": [{"n_clusters": s.n_clusters, "objective": s.objective, "bound": s.certificate.bound, "gap": s.gap,
                    "status": s.status.value} for s in path.solutions],
        "labels": [s.labels.tolist() for s in path.solutions], "tree": path.linkage.tolist(),
        "map": {"kind": "projection", "xlabel": "first direction", "ylabel": "second direction",
                "points": projected(models).tolist(), "samples": None,
                "note": "The two directions hold 99% of the differences between models."},
        "coefficients": {"names": ["first feature", "second feature", "intercept"], "outputs": None, "shown": 8,
                         "which": which,
                         "clusters": [[s.models[np.flatnonzero(s.labels == k)[0]].tolist() for k in group_numbers]
                                      for group_numbers, s in zip(which, path.solutions, strict=True)]},
        "scores": {"metric": "accuracy", "larger": True, "alone": accuracy(models[0]),
                   "together": accuracy(last.models), "points": [accuracy(m) for m in models],
                   "note": "On 1,000 fresh samples of each user."},
        "bounds": {"lower": 0.0822, "upper": 0.105,
                   "sentence": "lam = 0.09 lies in [0.0822, 0.105): these clusters are recovered."},
        "groups": {"sentence": "Three groups found without being told how many; 60 of 60 users are where they belong."},
        "federated": {"rounds": [{"round": k + 1, "gap": 10.0 ** (-1.2 * k - 0.3), "n_clusters": 60 if k < 3 else 3,
                                  "bytes_up": 14400 + 90 * k, "bytes_down": 4800, "answered": 24} for k in range(9)],
                      "sentence": "The same groups after 9 rounds with 24 of 60 users a round."},
        "settings": {"loss": "SquaredHinge", "ridge": 1e-3, "graph": "complete", "lam": 0.09, "tol": 1e-8},
        "notes": ["Scores are of the models as they are, not refitted by group."], "reduced": None,
    }


def projected(models: np.ndarray) -> np.ndarray:
    """(L, n, 2) the models in the plane in which those at the first lam differ most."""
    centre = models[0].mean(axis=0)
    return (models - centre) @ np.linalg.svd(models[0] - centre, full_matrices=False)[2][:2].T


def separators() -> dict[str, Any]:
    data, document = ellipses(seed=0), solved()
    rows = np.array(document["coefficients"]["clusters"][document["chosen"]])
    models = rows[np.searchsorted(np.sort(document["coefficients"]["which"][document["chosen"]]),
                                  document["labels"][document["chosen"]])] * [1, 1, -1]
    path = ct.solve_path(ct.Problem(data.users, ct.SquaredHinge(ridge=1e-3), 0.09), lams=document["lams"])
    points = np.stack([s.models * [1, 1, -1] for s in path.solutions])
    np.testing.assert_allclose(points[document["chosen"]], models, atol=1e-5)
    samples = np.column_stack([data.users.features, data.users.targets > 0, data.users.owner])
    return {**document, "map": {"kind": "separators", "xlabel": "first feature", "ylabel": "second feature",
                                "points": points.tolist(), "samples": samples.tolist(), "note": ""}}


def synthetic(n: int, n_lams: int, dim: int = 20, shown: int = 12) -> dict[str, Any]:
    """A document of any size: users join in order of number, halving the clusters at each lam."""
    rng = np.random.default_rng(0)
    lams = np.geomspace(1e-3, 1.0, n_lams) if n_lams > 1 else np.array([0.1])
    # Runs of 1, 2, 4, ... users: each cluster is two of the one before.
    runs = 2 ** np.round(np.linspace(0, np.ceil(np.log2(n)), n_lams)).astype(int)
    labels = np.arange(n) // runs[:, None]
    counts = labels[:, -1] + 1
    start = rng.standard_normal((n, dim))
    models = np.stack([np.stack([start[row == k].mean(axis=0) for k in range(row[-1] + 1)])[row] for row in labels])
    rows, node, size = [], list(range(n)), [1] * n
    for lam, row in zip([*lams, 2 * lams[-1]], [*labels, np.zeros(n, dtype=int)], strict=True):
        for k in range(1, n):
            if row[k] == row[k - 1] and node[k] != node[k - 1]:
                a, b = node[k - 1], node[k]
                size.append(size[a] + size[b])
                rows.append([a, b, float(lam), size[-1]])
                new = n + len(rows) - 1
                node = [new if other in (a, b) else other for other in node]
    which = [list(range(min(shown, k))) for k in counts]
    score = rng.uniform(0.5, 1.0, (n_lams + 2, n))
    return {
        "title": f"{n} users", "subtitle": "", "version": "0.1.0", "command": None, "task": "regression",
        "users": [f"user-{k}" for k in range(n)], "counts": rng.integers(5, 500, n).tolist(), "lams": lams.tolist(),
        "chosen": n_lams // 2, "labels": labels.tolist(), "tree": rows,
        "points": [{"n_clusters": int(k), "objective": 10.0 + k, "bound": 10.0 + k - 1e-8, "gap": 1e-9,
                    "status": "Solved."} for k in counts],
        "map": {"kind": "projection", "xlabel": "x", "ylabel": "y", "points": models[:, :, :2].tolist(),
                "samples": None, "note": ""},
        "coefficients": {"names": [f"feature {k}" for k in range(dim)], "outputs": None, "shown": shown, "which": which,
                         "clusters": [[m[np.flatnonzero(row == k)[0]].tolist() for k in group_numbers]
                                      for group_numbers, m, row in zip(which, models, labels, strict=True)]},
        "scores": {"metric": "error", "larger": False, "alone": score[0].tolist(), "together": score[1].tolist(),
                   "points": score[2:].tolist(), "note": ""},
        "bounds": None, "groups": None, "federated": None, "settings": {}, "notes": [], "reduced": None,
    }


@pytest.fixture
def show(browser, tmp_path):
    """Open documents; in the end nothing may have gone wrong in any of them."""
    tabs = []

    def opened(document: dict[str, Any], name: str = "report.html", **options: Any) -> Tab:
        tabs.append(Tab(browser, write(document, tmp_path / name), **options))
        return tabs[-1]

    yield opened
    problems = [problem for tab in tabs for problem in tab.problems()]
    for tab in tabs:
        tab.close()
    assert problems == []


# What is in the file


def embedded(page: str) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="document">(.*?)</script>', page, re.S)[1])


def unpacked(part: dict[str, Any]) -> np.ndarray:
    kind = {"u2": "<u2", "u4": "<u4", "f4": "<f4"}[part["kind"]]
    return np.frombuffer(base64.b64decode(part["data"]), dtype=kind).reshape(part["shape"])


def test_the_numbers_in_the_page_are_the_documents():
    document = synthetic(40, 5)
    content = embedded(render(document))
    np.testing.assert_array_equal(unpacked(content["labels"]), document["labels"])
    np.testing.assert_allclose(unpacked(content["map"]["points"]), document["map"]["points"], rtol=1e-6)
    np.testing.assert_allclose(unpacked(content["scores"]["points"]), document["scores"]["points"], rtol=1e-6)
    rows = [row for clusters in document["coefficients"]["clusters"] for row in clusters]
    np.testing.assert_allclose(unpacked(content["coefficients"]["clusters"]), rows, rtol=1e-6)
    packed = {"labels", "map", "scores", "coefficients"}
    kept = {k: v for k, v in document.items() if k not in packed}
    assert {k: v for k, v in content.items() if k not in packed} == kept


def test_cluster_numbers_of_a_large_run_fit():
    document = synthetic(2, 1) | {"labels": [[3, 99_999]]}
    assert unpacked(embedded(render(document))["labels"]).tolist() == [[3, 99_999]]


def test_unknown_numbers_are_null_in_the_page():
    document = synthetic(3, 2)
    document["points"][0] |= {"bound": -np.inf, "gap": np.inf}
    document["scores"]["points"][0][1] = None
    content = embedded(render(document))
    assert content["points"][0]["bound"] is None
    assert content["points"][0]["gap"] is None
    assert np.isnan(unpacked(content["scores"]["points"])[0, 1])


@pytest.mark.parametrize("text", [NASTY, "<!-- <script>", "]]>", "\u2028\u2029", "{{script}}", "a & \\u003c", "\ud800"])
def test_no_text_leaves_its_place(tmp_path, text):
    document = synthetic(2, 2) | {"title": text, "users": [text, "b"], "command": text, "notes": [text],
                                  "settings": {text: text}}
    page = write(document, tmp_path / "page.html").read_text(encoding="utf-8")
    assert embedded(page)["users"] == [text, "b"]
    tags = re.compile(r"<script|</script|<!--")
    assert tags.findall(page) == tags.findall(render(synthetic(2, 2)))
    assert not re.search("[\u2028\u2029]", page[page.index('id="document"'):])


def test_the_policy_lets_only_this_script_run():
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', render(synthetic(2, 2)))[1]
    assert "default-src &#x27;none&#x27;" in policy
    assert "script-src &#x27;sha256-" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_nothing_in_the_page_is_fetched():
    addresses = set(re.findall(r"https?://[^\s\"'>)]+", render(solved())))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_a_page_is_put_in_place_whole(tmp_path, monkeypatch):
    path = write(synthetic(2, 2), tmp_path / "page.html")
    before = path.read_bytes()

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        write(synthetic(3, 2), path)
    assert path.read_bytes() == before


def test_a_thousand_users_stay_small():
    assert len(render(synthetic(1000, 31)).encode()) < 2e6
    assert len(render(synthetic(1000, 31, dim=100, shown=30)).encode()) < 5e6


# In the browser


@pytest.mark.browser
def test_the_chosen_lam_is_shown_first(show):
    document = solved()
    tab = show(document)
    chosen = document["points"][document["chosen"]]
    assert tab.text("#answer") == "3 groups among 60 users."
    assert tab.text("#badge") == "Computation certified"
    assert tab.text("title") == document["title"]
    assert (tab.text("#now-lam"), tab.text("#now-clusters")) == ("0.09", "3")
    assert float(tab.text("#objective")) == pytest.approx(chosen["objective"], rel=1e-9)
    assert float(tab.text("#bound")) == pytest.approx(chosen["bound"], rel=1e-9)
    assert float(tab.text("#gap")) == pytest.approx(chosen["gap"], rel=0.06)
    assert tab.text("#status") == chosen["status"]
    assert tab.text("#federated-lead") == document["federated"]["sentence"]
    assert document["command"] in tab.text("#about")


@pytest.mark.browser
def test_a_private_run_shows_what_it_promises(show):
    promise = {"sentence": "epsilon = 4, delta = 1e-05, for all 2 releases of a user together.",
               "facts": [["Protected", "a row"], ["Certificate", "optimal for <b>released</b> statistics"]]}
    tab = show(solved() | {"privacy": promise})
    assert tab.text("#privacy-lead") == promise["sentence"]
    assert tab.text("#badge") == "Computation certified for the released statistics"
    assert tab.value("document.getElementById('private').hidden")
    told = show(solved() | {"privacy": promise, "headline": {"found": "x", "private": "Noise <b>hides</b> a row."}},
                "told.html")
    assert told.text("#private") == "Private: Noise <b>hides</b> a row."
    assert tab.text("#privacy .body") == "".join(": ".join(fact) for fact in promise["facts"])
    assert "#privacy" in tab.value("[...document.querySelectorAll('nav a')].map((a) => a.hash)")


@pytest.mark.browser
def test_a_federation_shows_bytes_by_kind_and_who_took_part(show):
    users = clustered("squared", n_users=9, n_clusters=3, samples=20, seed=0).users
    run = ct.federate(users, participation=0.5, settings=ct.fitting.Settings(average="off"))
    tab = show(gather(run))
    assert tab.text("#federated-lead").startswith(f"9 users took part in {run.n_rounds} rounds: ")
    kinds, people = tab.text("#bytes-by-kind"), tab.text("#who-answered")
    for words in ("second moments of the rows", "certificate"):
        assert words in kinds
        assert words in people
    asked = sum(line.asked for line in run.history)
    assert asked == 9 * len(run.ledger.by_kind())
    assert people.count("9") == 2 * asked // 9  # of each question, nine asked and nine answered
    tab = show(gather(ct.fitting.fit(users, ct.fitting.Settings())))
    assert tab.value("document.getElementById('federated').hidden")  # the twin


def expect(tab: Tab, document: dict[str, Any], at: int) -> None:
    """All that follows the slider shows the document's values at this point of the path."""
    labels, point = document["labels"][at], document["points"][at]
    sizes = sorted(np.bincount(labels).tolist())
    assert float(tab.text("#now-lam")) == pytest.approx(document["lams"][at], rel=1e-3)
    assert tab.text("#now-clusters") == f"{point['n_clusters']:,}"
    assert float(tab.text("#objective")) == pytest.approx(point["objective"], rel=1e-9)
    assert sorted(tab.numbers("#figure-map [data-size]", "size")) == sizes
    assert sorted(map(int, tab.texts("#figure-map .count"))) == [size for size in sizes if size > 1]
    rows = tab.value("[...document.querySelectorAll('#roster tbody tr')].map("
                     "(row) => [...row.children].map((c) => c.textContent))")
    for row in rows:
        user = document["users"].index(row[0])
        assert int(row[1]) == labels[user] + 1
        assert int(row[2]) == labels.count(labels[user])
        assert float(row[4].rstrip(" ▲▼")) == pytest.approx(document["scores"]["points"][at][user], abs=6e-4)
    mean = np.mean(document["scores"]["points"][at])
    assert tab.numbers("[data-kind=points] [data-mean]", "mean") == [pytest.approx(mean, abs=1e-6)]
    assert tab.numbers("#figure-coefficients [data-cluster]", "cluster") == document["coefficients"]["which"][at]


@pytest.mark.browser
def test_everything_follows_the_slider(show):
    document, tab = solved(), show(solved())
    at = document["chosen"]
    expect(tab, document, at)
    tab.focus("#slider")
    tab.press("ArrowLeft", "ArrowLeft", "ArrowLeft")
    expect(tab, document, at - 3)
    tab.press("Home")
    expect(tab, document, 0)
    assert tab.value("document.getElementById('previous').disabled")
    tab.click("#next")
    expect(tab, document, 1)
    tab.click("#back")
    expect(tab, document, at)
    tab.press("Tab")
    tab.click('#figure-path [data-lam="5"]')
    expect(tab, document, 5)
    assert tab.value("document.activeElement.getAttribute('data-lam')") == "5"
    tab.press("ArrowRight", "Enter")
    expect(tab, document, 6)


@pytest.mark.browser
@pytest.mark.parametrize("still", [False, True])
def test_dots_move_to_where_the_models_are(show, still):
    """Dots that coincide are one; those apart are as far apart as the models, on one scale."""
    document, tab = solved(), show(solved(), still=still)
    tab.click("#previous")
    at = document["chosen"] - 1
    if not still:
        tab.value("new Promise((done) => setTimeout(done, 900))")
    dots = tab.value("[...document.querySelectorAll('#figure-map [data-cluster]')].map((n) => "
                     "[Number(n.dataset.cluster), n.transform.baseVal[0].matrix.e, n.transform.baseVal[0].matrix.f])")
    drawn = np.array([dot[1:] for dot in sorted(dots)])
    models = np.array([document["map"]["points"][at][document["labels"][at].index(k)] for k, *_ in sorted(dots)])
    pixels = np.linalg.norm(drawn - drawn[0], axis=1)
    length = np.linalg.norm(models - models[0], axis=1)
    np.testing.assert_allclose(pixels, length * pixels.max() / length.max(), atol=0.05)


@pytest.mark.browser
def test_the_table_is_sorted_and_searched(show):
    document, tab = synthetic(120, 5), show(synthetic(120, 5))
    names = "#roster tbody th"
    assert tab.texts(names)[:3] == ["user-0", "user-1", "user-2"]  # by number, where names have one
    tab.click('[data-column="rows"] button')
    rows = list(map(int, tab.texts("#roster tbody td:nth-child(4)")))
    assert rows == sorted(document["counts"])[:50]
    tab.click('[data-column="rows"] button')
    assert list(map(int, tab.texts("#roster tbody td:nth-child(4)"))) == sorted(document["counts"])[::-1][:50]
    assert tab.value("document.querySelector('[data-column=rows]').getAttribute('aria-sort')") == "descending"
    assert tab.text("#count") == "1 to 50 of 120"
    tab.click('[aria-label="Next page of users"]')
    tab.click('[aria-label="Next page of users"]')
    assert tab.text("#count") == "101 to 120 of 120"
    tab.focus("#search")
    tab.type("R-11")
    assert sorted(tab.texts(names)) == sorted(["user-11", *(f"user-11{k}" for k in range(10))])
    assert tab.text("#count") == "11 users"
    tab.type(" nobody")
    assert tab.texts(names) == []


@pytest.mark.browser
def test_a_node_of_the_tree_selects_its_users(show):
    document, tab = solved(), show(solved())
    n = len(document["users"])
    node = next(k for k, row in enumerate(document["tree"]) if row[3] == 19 and document["tree"][-1][2] > row[2])
    members, waiting = set(), [n + node]
    while waiting:
        k = int(waiting.pop())
        if k < n:
            members.add(document["users"][k])
        else:
            waiting += document["tree"][k - n][:2]
    tab.click(f'[data-key="node-{n + node}"]')
    assert tab.text("#chip-text") == "Selection: 19 users"
    assert set(tab.texts("#roster tbody th")) == members
    assert tab.value("document.querySelectorAll('#figure-map .dim').length") == 2  # the clusters without them
    tab.click("#next")
    assert tab.text("#chip-text") == "Selection: 19 users"
    tab.click("#chip-clear")
    assert tab.value("document.getElementById('chip').hidden")
    assert tab.text("#count") == "1 to 50 of 60"
    # By keyboard: one tab stop, arrows between nodes, Enter selects.
    tab.focus("#figure-tree [tabindex='0']")
    tab.press("ArrowRight", "Enter")
    size = tab.value("Number(document.activeElement.dataset.size)")
    assert tab.text("#chip-text") == f"Selection: {size} users"
    tab.press("Escape")
    assert tab.value("document.getElementById('chip').hidden")


@pytest.mark.browser
@pytest.mark.parametrize("make", [solved, separators])
def test_a_cluster_of_the_map_is_selected(show, make):
    document, tab = make(), show(make())
    inside = "" if make is solved else " .mark"  # a line is pressed on its badge
    tab.click(f"#figure-map [data-cluster='1']{inside}")
    members = [u for u, k in zip(document["users"], document["labels"][document["chosen"]], strict=True) if k == 1]
    assert tab.texts("#roster tbody th") == members
    assert "group 2: 20 users" in tab.text("#tip")


@pytest.mark.browser
def test_the_theme_is_switched_and_remembered(show):
    tab = show(synthetic(4, 3))
    background = "getComputedStyle(document.body).backgroundColor"
    light = tab.value(background)
    tab.click("#theme")
    dark = tab.value(background)
    assert sum(map(int, re.findall(r"\d+", dark))) < 200 < 600 < sum(map(int, re.findall(r"\d+", light)))
    tab.load()
    assert tab.value(background) == dark
    tab.click("#theme")
    assert tab.value(background) == light
    assert show(synthetic(4, 3), "other.html", dark=True).value(background) == dark  # the system's theme


@pytest.mark.browser
def test_tables_are_downloaded_as_csv(show):
    names = ["=1+1", "@x", "-5", '+say "hi", you', "plain", "-a\nb"]
    document = synthetic(6, 3) | {"users": names}
    document["scores"]["points"][1][4] = None
    tab = show(document)
    name, data = tab.download("users-csv")
    rows = list(csv.DictReader(io.StringIO(data.decode("utf-8"), newline="")))
    assert name == "users.csv"
    assert {row["user"] for row in rows} == {"'=1+1", "'@x", "-5", "'+say \"hi\", you", "plain", "'-a\nb"}
    for row in rows:
        user = [n.lstrip("'") for n in names].index(row["user"].lstrip("'"))
        assert int(row["Group"]) == document["labels"][1][user] + 1
        assert int(row["Rows"]) == document["counts"][user]
        expected = document["scores"]["points"][1][user]
        content = float(row["error"]) if row["error"] else None
        assert content == (expected and pytest.approx(expected, rel=1e-6))
    _, data = tab.download("path-csv")
    rows = list(csv.DictReader(io.StringIO(data.decode("utf-8"), newline="")))
    assert [float(row["lam"]) for row in rows] == document["lams"]
    assert [row["chosen"] for row in rows] == ["", "yes", ""]


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_charts_are_downloaded_as_pictures(show, dark):
    tab = show(solved(), dark=dark)
    for chart in ("path", "tree", "map", "scores", "coefficients", "gaps", "rounds", "bytes"):
        name, data = tab.download(f"{chart}-png")
        image = Image.open(io.BytesIO(data)).convert("RGB")
        assert name.startswith(chart)
        assert name.endswith(".png")
        assert image.width > 600
        assert len(image.getcolors(1 << 24)) > 10
        assert (sum(image.getpixel((0, 0))) < 200) == dark


@pytest.mark.browser
def test_markup_in_names_is_text(show):
    document = synthetic(3, 3)
    images = [f"<img src=x onerror=alert({k})>" for k in range(3)]
    document |= {"title": NASTY, "subtitle": images[0], "users": [NASTY, images[1], "</script><b>"], "notes": [NASTY],
                 "command": NASTY, "settings": {NASTY: NASTY}, "groups": {"sentence": images[2]}}
    document["coefficients"]["names"][0] = NASTY
    document["scores"]["metric"] = images[0]
    tab = show(document)
    tab.click("#figure-map [data-cluster]")
    tab.press("Escape")
    assert tab.text("h1") == NASTY
    assert tab.texts("#roster tbody th") == ["</script><b>", images[1], NASTY]
    assert tab.value("document.querySelectorAll('img, b:not(.fact b, .tip b)').length") == 0


@pytest.mark.browser
def test_a_script_that_is_not_ours_does_not_run(browser, tmp_path):
    """The twin of the above: markup that does reach the page is stopped by its policy, and the checks above see it."""
    page = render(synthetic(2, 2)).replace("<noscript>", "<script>window.ran = true</script><noscript>")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    tab = Tab(browser, tmp_path / "page.html")
    assert tab.value("window.ran === undefined")
    [(kind, text)] = tab.problems()
    assert kind == "console"
    assert "Content Security Policy" in text
    tab.value("setTimeout(() => { throw new Error('seen') })")
    tab.value("console.error('seen')")
    tab.value("fetch('http://127.0.0.1:9/').catch(() => 0)")
    tab.value("setTimeout(() => alert('seen'))")
    assert {("pageerror", "seen"), ("console", "seen"), ("dialog", "seen")} <= set(tab.problems())
    tab.close()


@pytest.mark.browser
def test_a_request_that_leaves_the_machine_is_seen(browser, tmp_path):
    address = "http://127.0.0.1:9/picture.png"
    (tmp_path / "page.html").write_text(f'<!doctype html><img src="{address}">', encoding="utf-8")
    tab = Tab(browser, tmp_path / "page.html")
    assert {("request", address), ("requestfailed", address)} <= set(tab.problems())
    tab.close()


@pytest.mark.browser
def test_a_thousand_users_open_and_move_fast(show):
    tab = show(synthetic(1000, 31))
    assert tab.seconds < 5.0
    assert tab.file.stat().st_size < 5e6
    expect(tab, synthetic(1000, 31), 15)
    tab.focus("#slider")
    start = time.monotonic()
    tab.press("Home")
    expect(tab, synthetic(1000, 31), 0)
    assert time.monotonic() - start < 5.0
    assert tab.value("document.querySelectorAll('#figure-tree .node').length") < 130


@pytest.mark.browser
@pytest.mark.parametrize("make", [solved, separators, lambda: synthetic(1000, 31)])
def test_a_phone_shows_it_without_scrolling_sideways(show, make):
    tab = show(make(), width=390)
    assert tab.value("document.documentElement.scrollWidth") <= 390
    tab.size(844)
    tab.value("new Promise((done) => setTimeout(done, 200))")
    assert tab.value("document.documentElement.scrollWidth") <= 844
    assert tab.value("document.querySelector('#figure-path svg').clientWidth") > 600


@pytest.mark.browser
def test_it_prints(show):
    tab = show(solved())
    pdf = tab.pdf()
    assert pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 12
    tab.size(690)
    tab.page.emulate_media(media="print")
    tab.value("dispatchEvent(new Event('beforeprint'))")
    assert tab.value(SMALL) == []


SECTIONS = {"evidence", "stability", "personal", "path", "map", "scores", "users", "coefficients", "certificate",
            "privacy", "federated", "about"}


def on_a_line() -> dict[str, Any]:
    """Models of one number, some of them equal."""
    document = synthetic(30, 5)
    return document | {"task": "clustering", "map": {"kind": "line", "xlabel": "value", "ylabel": "", "note": "",
                                                     "points": np.array(document["map"]["points"])[:, :, :1].tolist()}}


def multiclass() -> dict[str, Any]:
    document = synthetic(6, 3, dim=6)
    return document | {"coefficients": document["coefficients"] | {"names": ["a", "b"], "outputs": ["x", "y", "z"]}}


@pytest.mark.browser
@pytest.mark.parametrize(("document", "hidden"), [
    ({"title": "t", "users": ["a", "b"], "lams": [0.1], "chosen": 0}, SECTIONS - {"users", "about"}),
    (dict.fromkeys(synthetic(2, 2)), SECTIONS - {"about"}),
    (synthetic(5, 4) | dict.fromkeys(["tree", "map", "coefficients", "scores", "counts"]),
     {"map", "coefficients", "scores", "federated"}),
    (synthetic(1, 1), {"path", "federated"}),
    (synthetic(1, 4), {"federated"}),
    (synthetic(7, 1), {"path", "federated"}),
    (synthetic(3, 2) | {"lams": [0.0, 0.5]}, {"federated"}),
    (multiclass(), {"federated"}),
    (on_a_line(), {"federated"}),
    (synthetic(900, 8) | {"reduced": {"users": 100_000, "shown": 900}}, {"federated"}),
], ids=["bare", "none", "no parts", "one user, one lam", "one user", "one lam", "lam 0", "classes", "line", "reduced"])
def test_what_is_not_there_is_not_shown(show, document, hidden):
    hidden = hidden | {"evidence", "stability", "personal", "privacy", "curves", "checks"}  # of a fit only
    tab = show(document)
    assert set(tab.value("[...document.querySelectorAll('section[hidden]')].map((s) => s.id)")) == hidden
    assert "undefined" not in tab.value("document.body.innerText")
    assert "NaN" not in tab.value("document.body.innerHTML.split('<script')[0]")
    assert set(tab.value("[...document.querySelectorAll('nav a')].map((a) => a.hash.slice(1))")) == SECTIONS - hidden
    if document.get("reduced"):
        assert "900 of 100,000 users" in tab.text("#reduced")
        assert "among 100,000 users" in tab.text("#answer")


def with_evidence(**changes: Any) -> dict[str, Any]:
    """Four groups of five users, with weights that were made from them, as a fit has them."""
    document = synthetic(20, 3)
    labels = np.arange(20) // 5
    document |= {"labels": [list(range(20)), list(range(20)), labels.tolist()], "chosen": 2, "bounds": None}
    groups = {"sentence": "The groups are unstable.", "kind": "groups", "from_groups": True,
              "compared": {"one model": 0.5, "groups": 0.2, "alone": 0.25}, "stays": [0.9] * 5 + [0.5] * 15,
              "errors": {"one model": 0.03, "groups": 0.0, "alone": 0.01},
              "stability": {"stable": False, "index": 0.61, "searched": 0.4, "groups": [0.9, 0.5, 0.5, 0.5]},
              "held_out": {"gain": 0.031, "error": 0.012, "worse": 1, "users": 20, "rows": 80}}
    return document | {"groups": groups | changes}


@pytest.mark.browser
def test_the_evidence_for_groups_is_shown(show):
    tab = show(with_evidence())
    rows = [[cell.strip() for cell in row.split("|")] for row in tab.value(
        "[...document.querySelectorAll('#kinds tr')].map((r) => [...r.children].map((c) => c.innerText).join('|'))")]
    assert rows == [["Kind of models", "Expected loss", "Difference"], ["One model for all", "0.50", "+0.30 ± 0.03"],
                    ["One model per group (chosen)", "0.20", "\u2013"], ["Everyone alone", "0.25", "+0.05 ± 0.01"]]
    assert tab.texts("#stability tbody td:last-child") == ["90%", "50%", "50%", "50%"]
    assert tab.text("#groups") == "The groups are unstable."
    lead = tab.text("#stability-lead")
    assert lead.startswith("The groups are unstable: with other rows of the same users they agree by")
    assert "0.61, 0.40 for a new search" in lead
    assert tab.texts("#stability dd") == ["0.61", "0.40", "15"]
    lead = tab.text("#evidence-lead")
    assert "better than that of each user's own model by 0.031 (standard error 0.012)" in lead
    assert "1 of 20 users is worse off than alone by more than chance" in lead
    assert tab.text("#answer").startswith("Unstable groups: ")
    assert "does not prove that the groups are right" in tab.text("#certificate")
    assert "recovered" not in tab.value("document.body.innerText")
    assert tab.texts("#roster [data-column='stays']") != []
    stable = show(with_evidence(stability={"stable": True, "index": 1, "searched": None, "groups": [1, 1, 1, 1]},
                                held_out=None, from_groups=False), "stable.html")
    assert stable.text("#stability-lead").startswith("The groups are stable: ")
    assert not stable.text("#answer").startswith("Unstable")


@pytest.mark.browser
def test_outputs_of_a_classifier_are_chosen(show):
    tab = show(multiclass())
    value = "#figure-coefficients [data-cluster='0'] .value"
    cluster = multiclass()["coefficients"]["clusters"][1][0]
    for output in range(3):
        tab.value(f"(() => {{ const s = document.getElementById('output'); s.value = {output};"
                  "s.dispatchEvent(new Event('change')); })()")
        assert [float(x) for x in tab.texts(value)] == pytest.approx([cluster[output], cluster[3 + output]], rel=0.01)


# What a manager reads first


def of_a_fit(**settings: Any) -> dict[str, Any]:
    users = clustered("squared", n_users=9, n_clusters=3, samples=40, n_features=3, separation=2.0, seed=0).users
    scaled = dataclasses.replace(users, features=users.features * [1.0, 100.0, 0.01] + 5.0)
    return gather(ct.fitting.fit(scaled, ct.fitting.Settings(n_lams=5, **settings)))


@pytest.mark.browser
def test_the_headline_is_first_and_the_certificate_a_badge(show):
    document = of_a_fit()
    tab = show(document)
    said = document["headline"]
    assert tab.text("#answer") == said["found"]
    assert tab.texts("#who .differs") == [each["differs"] for each in said["groups"]]
    assert tab.texts("#who b") == [f"Group {k}, {each['users']} users" for k, each in enumerate(said["groups"], 1)]
    for name in ("better", "sure"):
        assert tab.text(f"#{name} dd").startswith(said[name])
    assert tab.value("document.querySelector('#better .explained').hidden")
    tab.click("#better .help")
    assert not tab.value("document.querySelector('#better .explained').hidden")
    first = tab.value("document.querySelector('.top').innerText").lower()
    assert not [word for word in ("lam", "gap", "nats", "rand index") if re.search(rf"\b{word}\b", first)]
    assert tab.value("document.getElementById('warnings').hidden")
    assert "certif" not in tab.text("#answer").lower()
    tab.click("#badge")
    assert tab.value("location.hash") == "#certificate"
    assert tab.text("#settings") == document["settings_sentence"]
    one = show(of_a_fit(lam=1e4), "one.html")
    assert one.text("#warnings").startswith("Warning: On held-out rows, models from each user's own rows only")
    document["points"][document["chosen"]]["gap"] = None
    assert show(document, "open.html").text("#badge") == "Computation not certified"


@pytest.mark.browser
def test_coefficients_are_in_the_units_of_the_table_until_the_switch_is_pressed(show):
    document = of_a_fit()
    tab = show(document)
    value, at = "#figure-coefficients [data-cluster='0'] .value", document["chosen"]
    k = document["coefficients"]["which"][at].index(0)
    raw, scaled = (document["coefficients"][name][at][k] for name in ("clusters", "standardized"))
    errors = [document["coefficients"]["errors"][name] for name in document["coefficients"]["names"]]

    def told() -> list[float]:
        return [float(text.replace(",", "")) for text in tab.texts(value)]

    assert all(abs(a - b) <= 0.5 * e for a, b, e in zip(told(), raw, errors, strict=True))  # rounded to their error
    assert "in the units of the table" in tab.text("#coefficients-lead")
    tab.click("#standard-units")
    assert told() == pytest.approx(scaled, rel=0.01, abs=1e-3)
    assert "standardised columns" in tab.text("#coefficients-lead")
    _, data = tab.download("coefficients-csv")
    rows = list(csv.DictReader(io.StringIO(data.decode("utf-8"), newline="")))
    assert [float(row["group 1"]) for row in rows] == pytest.approx(scaled, rel=1e-5)
    tab.click("#standard-units")
    assert all(abs(a - b) <= 0.5 * e for a, b, e in zip(told(), raw, errors, strict=True))
    assert show(solved(), "solved.html").value("document.getElementById('standard-units')") is None  # no units


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_no_column_of_twenty_groups_is_clipped(show, width):
    document = synthetic(40, 7, shown=40) | {"chosen": 1}
    tab = show(document, width=width)
    slot, columns = "document.querySelector('#figure-coefficients .plot')", "#figure-coefficients [data-cluster]"
    assert tab.value(f"document.querySelectorAll('{columns}').length") == 20
    inside = tab.value(f"""(() => {{
        const slot = {slot}, box = slot.querySelector("svg").getBoundingClientRect();
        return [...document.querySelectorAll("{columns}")].every((column) => {{
            const own = column.getBoundingClientRect();
            return own.left >= box.left && own.right <= box.right + 0.5 && own.bottom <= box.bottom + 0.5;
        }});
    }})()""")
    assert inside
    if width > 600:  # wrapped
        assert tab.value(f"{slot}.scrollWidth <= {slot}.clientWidth")
        return
    assert tab.value("document.documentElement.scrollWidth") <= width
    names = "document.querySelector('#figure-coefficients .feature').getBoundingClientRect().left"
    before = tab.value(names)
    tab.value(f"new Promise((done) => {{ {slot}.scrollLeft = 900; setTimeout(done, 200); }})")
    assert tab.value(f"{slot}.scrollLeft") == 900
    assert tab.value(names) == pytest.approx(before, abs=1)  # names stay where they are


SMALL = """[...document.querySelectorAll("body *")].filter((node) => {
    if (node.closest("script, style, noscript") || !node.getClientRects().length) return false;
    if (![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) return false;
    const svg = node.ownerSVGElement;
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    return parseFloat(getComputedStyle(node).fontSize) * scale < 12;
}).map((node) => node.outerHTML.slice(0, 90))"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("make", [solved, separators, of_a_fit, lambda: synthetic(1000, 31), lambda: with_evidence(),
                                  lambda: synthetic(40, 7, shown=40) | {"chosen": 1}])
def test_no_text_is_smaller_than_twelve_pixels(show, make, width):
    tab = show(make(), width=width)
    assert tab.value(SMALL) == []
    tab.value("document.querySelector('.lead').style.fontSize = '11.9px'")
    tab.value("document.querySelector('.lead').textContent = 'small'")
    tab.value("document.querySelector('.lead').closest('section').hidden = false")
    assert len(tab.value(SMALL)) == 1  # the twin


@pytest.mark.browser
def test_users_without_groups_are_not_called_groups(show):
    tab = show(of_a_fit(lam=0.0))
    assert tab.text("h1") == "No groups among 9 users"
    assert "9 groups" not in tab.value("document.body.innerText")
    assert (tab.text("#now-clusters"), tab.text("#now-clusters-name")) == ("9", "separate models")
    assert tab.texts("#roster [data-column=cluster]") == []  # a column of groups that there are not
    assert len(tab.texts("#roster [data-column=rows]")) == 1
    assert tab.text("#users-lead") == "Every user has a model of its own at this lam."


@pytest.mark.browser
def test_the_page_of_one_user_compares_nothing(show):
    users = clustered("squared", n_users=1, n_clusters=1, samples=40, seed=0).users
    tab = show(gather(ct.fitting.fit(users, ct.fitting.Settings(n_lams=5))))
    assert tab.texts("#contents a") == ["Models", "Users", "Certificate", "About"]
    assert tab.text("#coefficients h2") == "The user's model"
    assert "one model for all" not in tab.value("document.body.innerText").lower()


@pytest.mark.browser
def test_the_tree_of_one_group_is_drawn_where_it_is_asked_for(show):
    tab = show(of_a_fit(lam=1e4))
    assert tab.value("document.querySelectorAll('#figure-tree path').length") == 0
    tab.click("#more-tree summary")
    tab.value("new Promise((done) => setTimeout(done, 200))")
    assert tab.value("document.querySelectorAll('#figure-tree path').length") > 0
    tab = show(of_a_fit(), "groups.html")
    assert tab.value("document.querySelectorAll('#figure-tree path').length") > 0


@pytest.mark.browser
def test_shares_of_coefficients_are_drawn(show):
    shares = {"names": ["price", "level"], "shared": [6.0, 0.0], "groups": [3.0, 0.0], "personal": [1.0, 4.0]}
    tab = show(with_evidence(kind="personal in groups") | {"shares": shares})
    assert tab.texts("#figure-shares .inside") == ["60%", "30%", "10%", "100%"]
    assert tab.texts("#figure-shares .value") == ["2", "2"]
    assert "63% are personal" in tab.text("#personal-lead")
    _, data = tab.download("shares-csv")
    assert data.decode().splitlines()[1] == "price,6,3,1"


# Curves, intervals, probabilities, and small screens


def curved(n: int = 6) -> dict[str, Any]:
    """A document with one column that bends by group and one that is straight."""
    x = np.linspace(0, 4, 9)
    bent = [[float(k % 2) + v for v in (x**2).tolist()] for k in range(n)]
    flat = [(0.5 * x + k).tolist() for k in range(n)]
    document = synthetic(n, 3)
    labels = [list(range(n)), list(range(n)), [k % 2 for k in range(n)]]
    columns = [{"name": name, "x": x.tolist(), "everyone": np.mean(rows, axis=0).tolist(),
                "groups": [np.mean(rows[k::2], axis=0).tolist() for k in range(2)], "users": rows, "bends": bends,
                "differs": False} for name, rows, bends in (("time", bent, True), ("dose", flat, False))]
    return document | {"labels": labels, "chosen": 2, "noun": "chick", "nouns": "chicks",
                       "curves": {"target": "weight", "shown": list(range(n)), "columns": columns},
                       "headline": {"found": "2 groups.", "curves": "time bends."}}


@pytest.mark.browser
def test_curves_of_all_groups_and_one_user_are_drawn(show):
    document = curved()
    tab = show(document)
    assert tab.text("#curves h2") == "Which columns bend, and for whom"
    assert tab.text("#curves-lead") == "time bends."
    assert tab.texts("#figure-curves .bends") == ["bends"]
    assert "straight" in tab.texts("#figure-curves .soft")
    counts = tab.value("['.one', '.many', '.every', '.chosen-one'].map("
                       "(name) => document.querySelectorAll('#figure-curves ' + name).length)")
    assert counts == [12, 4, 2, 0]
    tab.page.select_option("#one-user", label=document["users"][3])
    assert tab.value("document.querySelectorAll('#figure-curves .chosen-one').length") == 2
    _, data = tab.download("curves-csv")
    rows = list(csv.DictReader(io.StringIO(data.decode("utf-8"), newline="")))
    assert [float(row["group 2"]) for row in rows[:9]] == pytest.approx(document["curves"]["columns"][0]["groups"][1])
    straight = curved()
    straight["curves"]["columns"][0]["bends"] = False
    assert show(straight, "straight.html").text("#curves h2") == "What each column does"


@pytest.mark.browser
def test_coverage_and_reliability_are_shown(show):
    checks = {"level": 0.9, "users": [1.0, 1.0, 0.5, None, 1.0], "mean": 0.875, "median": 1.0, "reliability": None}
    tab = show(synthetic(5, 3) | {"checks": checks})
    assert tab.text("#checks-lead").startswith("Intervals of 90% hold 88% of the held-out rows, as a mean over users")
    assert tab.text("#checks-lead").endswith("Below 70%: 1 user.")
    assert tab.texts("#roster td[data-label='In interval']") == ["100%", "100%", "50%", "\u2013", "100%"]
    bins = [[0.1, 0.12, 40], [0.9, 0.85, 40]]
    tab = show(synthetic(5, 3) | {"checks": {"level": 0.9, "users": None, "reliability": bins}}, "classes.html")
    assert tab.text("#checks h2") == "Whether probabilities are right"
    assert tab.value("document.querySelectorAll('#figure-reliability .dot').length") == 2
    assert tab.texts("#roster td[data-label='In interval']") == []


@pytest.mark.browser
def test_a_table_of_users_is_cards_on_a_phone(show):
    wide = show(synthetic(40, 7))
    display = "getComputedStyle(document.querySelector('#roster tbody tr')).display"
    assert wide.value(display) == "table-row"
    tab = show(synthetic(40, 7), "phone.html", width=390)
    assert tab.value(display) == "grid"
    label = "getComputedStyle(document.querySelector('#roster td[data-label]'), '::before').content"
    assert tab.value(label) == '"Group"'
    assert tab.value("document.querySelector('#roster').scrollWidth") <= 390


@pytest.mark.browser
def test_axes_have_at_most_seven_numbers(show):
    for make in (solved, lambda: synthetic(1000, 31), curved):
        tab = show(make(), f"{id(make)}.html", width=1900)
        counts = tab.value("[...document.querySelectorAll('svg .axis')].map("
                           "(axis) => axis.querySelectorAll('text:not(.name)').length)")
        assert counts
        assert max(counts) <= 7


@pytest.mark.browser
def test_what_is_printed_first_is_one_page_of_summary(show):
    tab = show(of_a_fit())
    tab.page.emulate_media(media="print")
    breaks = tab.value("['evidence', 'coefficients'].map("
                       "(id) => getComputedStyle(document.getElementById(id)).breakBefore)")
    assert breaks == ["page", "auto"]
    top = tab.value("document.querySelector('#evidence').getBoundingClientRect().top + scrollY")
    assert top < 1000  # a page of A4 has about 1040 pixels between its margins

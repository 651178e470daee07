"""Private runs over nodes: their budgets, ledgers and refusals, and tables whose meaning is public."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars
import pytest
from support.nosy import write

import coterie as ct
from coterie.datasets import clustered
from coterie.federated.agreement import Introduction
from coterie.federated.algorithms.base import Replies
from coterie.federated.fit import fit_federation
from coterie.federated.node import Node, load_models
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.private.policy import mu_of
from coterie.federated.protocol.messages import Query, Reply, decode
from coterie.federated.settings import Deployment, FederationSettings, for_nodes

CONFIG = {"epsilon": 8.0, "loss": "squared", "clip": "x0=-6:6, x1=-6:6, target=-6:6"}


class Wire:
    """Nodes in this process that hear and say bytes only."""

    def __init__(self, nodes: list[dict[str, Any]], config: dict[str, Any]) -> None:
        self.own, self.said, self.refused = nodes, for_nodes(config), {}
        self.names: tuple[Any, ...] = ()
        self.home: dict[Any, int] = {}
        self.crossed: list[Reply] = []

    def gather(self, n_users: int, wait: float) -> list[tuple[str, Introduction]]:
        said = [Node(self.said, own).introduce() for own in self.own]
        met = [Introduction.from_json(one["introduction"]) for one in said]
        self.home = {name: k for k, one in enumerate(met) for name in one.names}
        return [(f"node {k}", one) for k, one in enumerate(met)]

    def use(self, agreement: Any) -> None:
        self.names = agreement.names
        self.said = {**self.said, "agreement": agreement.to_json(), "run": agreement.run}

    def begin(self, run: str) -> None: ...

    def identity(self) -> dict[str, str]:
        return {"users": repr(self.names)}

    def exchange(self, queries: Any) -> Replies:
        singles, refused = [], []
        if not self.home:  # the run is continued
            self.gather(0, 0.0)
        for k in queries.users.tolist():
            name = self.names[k]
            answers = Node(self.said, self.own[self.home[name]]).answer({json.dumps(name): queries[k].encode()})
            if answers.replies:
                reply = decode(answers.replies[json.dumps(name)])
                self.crossed.append(reply)
                singles.append((k, reply))
            else:
                refused.append((k, f"its node refuses: {answers.refusals[json.dumps(name)]}"))
        return Replies(singles=tuple(singles), refused=tuple(refused))


@pytest.fixture
def nodes(tmp_path) -> list[dict[str, Any]]:
    users = clustered("squared", n_users=6, n_clusters=2, samples=120, seed=0).users
    made = []
    for k, part in enumerate(([0, 1, 2], [3, 4, 5])):
        file = write(users.take(part), tmp_path / f"{k}.npz")
        made.append({"data": "npz", "path": file, "ledger-dir": str(tmp_path / f"ledger-{k}"),
                     "budget-epsilon": 8.0, "budget-delta": 1e-5})
    return made


def run(wire: Wire, config: dict[str, Any] = CONFIG, **carriage: Any) -> Any:
    settings = Deployment.of(config)
    assert settings.fit is not None
    assert settings.privacy is not None
    return fit_federation(wire, settings, settings.fit, FederationSettings(**carriage), settings.privacy)


def test_releases_are_paid_once_and_repeated(nodes):
    wire, again = Wire(nodes, CONFIG), Wire(nodes, CONFIG)
    fit = run(wire)
    assert {reply.kind for reply in wire.crossed} == {"release", "home"}
    with NodeLedger(nodes[0]["ledger-dir"], mu_of(8.0, 1e-5)) as ledger:
        spent = ledger.spending(1e-5)
    assert all(7.9 < epsilon <= 8.0 for epsilon in spent.values())
    same = run(again)  # the same questions: the same bytes, for nothing
    assert np.array_equal(fit.models, same.models)
    with NodeLedger(nodes[0]["ledger-dir"], mu_of(8.0, 1e-5)) as ledger:
        assert ledger.spending(1e-5) == spent


def test_a_budget_that_is_spent_stays_spent(nodes):
    run(Wire(nodes, CONFIG))
    with pytest.raises(ct.CoterieError, match="budget of the user is spent"):
        run(Wire(nodes, {**CONFIG, "clip": "x0=-5:5, x1=-5:5, target=-6:6"}), {
            **CONFIG, "clip": "x0=-5:5, x1=-5:5, target=-6:6"})


def test_nothing_but_releases_leaves_a_node_with_a_budget(nodes):
    wire = Wire(nodes, CONFIG)
    run(wire)
    name = wire.names[0]
    for kind, arrays in (("moments", {}), ("describe", {}), ("local", {"ridge": np.array(1e-3)})):
        query = Query(kind, 9, arrays)
        answers = Node(wire.said, nodes[0]).answer({json.dumps(name): query.encode()})
        assert not answers.replies
        assert "does not allow" in answers.refusals[json.dumps(name)]


def test_a_node_without_a_budget_is_set_aside_and_the_run_goes_on(nodes, tmp_path):
    for key in ("budget-epsilon", "budget-delta"):
        del nodes[1][key]
    wire = Wire(nodes, CONFIG)
    fit = run(wire, checkpoint=tmp_path / "checkpoint")
    assert len(fit.names) == 3
    assert set(fit.aside) == set(range(3, 6))
    assert all("no privacy budget" in reason for reason in fit.aside.values())
    with NodeLedger(nodes[0]["ledger-dir"], mu_of(8.0, 1e-5)) as ledger:  # nobody released twice for it
        assert all(epsilon <= 8.0 for epsilon in ledger.spending(1e-5).values())


def test_who_is_set_aside_late_makes_nobody_release_again(nodes, tmp_path):
    nodes[1]["budget-epsilon"] = 4.0  # enough for the scaling, not for the summary
    fit = run(Wire(nodes, CONFIG), checkpoint=tmp_path / "checkpoint")
    assert set(fit.aside) == set(range(3, 6))
    with NodeLedger(nodes[0]["ledger-dir"], mu_of(8.0, 1e-5)) as ledger:
        assert all(epsilon <= 8.0 for epsilon in ledger.spending(1e-5).values())


@pytest.mark.slow
def test_an_interrupted_run_continues_with_the_same_releases(nodes, tmp_path):
    class Stopped(Wire):
        def exchange(self, queries: Any) -> Replies:
            if len(self.crossed) >= 12:
                raise KeyboardInterrupt
            return super().exchange(queries)

    with pytest.raises(KeyboardInterrupt):
        run(Stopped(nodes, CONFIG), checkpoint=tmp_path / "checkpoint")
    fit = run(Wire(nodes, CONFIG), checkpoint=tmp_path / "checkpoint")
    assert np.array_equal(fit.models, run(Wire(nodes, CONFIG)).models)


def test_a_checkpoint_of_another_promise_is_refused(nodes, tmp_path):
    run(Wire(nodes, CONFIG), checkpoint=tmp_path / "checkpoint")
    other = {**CONFIG, "clip": "x0=-5:5, x1=-6:6, target=-6:6"}
    with pytest.raises(ct.InvalidInput, match="another run: its clip is"):
        run(Wire(nodes, other), other, checkpoint=tmp_path / "checkpoint")


def test_models_finished_at_home_stay_there(nodes, tmp_path):
    nodes[0]["models-dir"] = str(tmp_path / "models")
    wire = Wire(nodes, CONFIG)
    fit = run(wire)
    kept = load_models(tmp_path / "models")
    assert set(kept.names) == {0, 1, 2}
    assert fit.at_home is None
    assert not np.allclose(kept.models, fit.models[:3])
    assert all(not reply.arrays["who"].any() for reply in wire.crossed if reply.kind == "home")


def test_an_absurd_release_is_set_aside(nodes):
    class Liar(Wire):
        def exchange(self, queries: Any) -> Replies:
            replies = super().exchange(queries)
            return Replies(singles=tuple(
                (k, Reply(reply.kind, reply.round, {"released": 1e12 + 0 * reply.arrays["released"]})
                 if k == 5 and reply.kind == "release" and len(self.names) == 6 else reply)
                for k, reply in replies.singles), refused=replies.refused)

    fit = run(Liar(nodes, CONFIG))
    assert set(fit.aside) == {5}
    assert np.abs(fit.coefficients).max() < 100


def test_tables_say_names_of_columns_only(tmp_path):
    rng = np.random.default_rng(0)
    rows = [{"who": f"clinic {i}", "age": float(rng.uniform(20, 80)), "sex": str(rng.choice(["f", "m"])),
             "note": "secret text", "sick": "yes" if rng.random() < 0.5 else "no"} for i in range(4) for _ in range(80)]
    polars.DataFrame(rows).write_csv(tmp_path / "t.csv")
    own = {"data": "csv", "path": str(tmp_path / "t.csv"), "user": "who", "target": "sick",
           "ledger-dir": str(tmp_path / "ledger"), "budget-epsilon": 8.0, "budget-delta": 1e-5}
    config = {"epsilon": 8.0, "user": "who", "target": "sick", "clip": "age=0:100, sex=f|m, sick=no|yes"}
    said = Node(for_nodes(config), own).introduce()["introduction"]
    assert json.loads(said)["features"] == []  # what a column holds is what its cells say
    assert not any(word in said for word in ("secret", "yes", "20"))
    named = {**own, "columns": "age=number, note"}
    assert json.loads(Node(for_nodes(config), named).introduce()["introduction"])["features"] == ["age"]
    wire = Wire([own], config)
    fit = run(wire, config)
    assert fit.recipe.class_values == ("no", "yes")
    assert fit.units.feature_names == ("age", "sex=m")
    assert "age, sex" in " ".join(fit.recipe.notes).replace("'", "")
    for wrong in ({"features": "age, note"}, {"features": "age, note", "clip": ""}):  # nothing is left out silently
        with pytest.raises(ct.InvalidInput, match="too little of the column 'note' is public"):
            run(Wire([{**named, "features": "", "columns": "age=number, note"}], {**config, **wrong}),
                {**config, **wrong})
    texts = {**config, "epsilon": 2.0, "clip": "sex=f|m, sick=no|yes"}  # no column of numbers at all
    fresh = {**own, "features": "sex", "ledger-dir": str(tmp_path / "other")}
    assert run(Wire([fresh], texts), texts).units.feature_names == ("sex=m",)
    without = {**config, "clip": "age=0:100, sex=f|m"}
    with pytest.raises(ct.InvalidInput, match=r"numbers|bounds"):
        run(Wire([own], without), without)


def test_a_run_that_is_refused_before_anything_is_released_leaves_no_checkpoint(nodes, tmp_path):
    folder = tmp_path / "checkpoint"
    wrong = {**CONFIG, "clip": "x0=-6:6, target=-6:6"}  # the recipe has x1, too
    with pytest.raises(ct.InvalidInput, match="x1"):
        run(Wire(nodes, wrong), wrong, checkpoint=folder)
    assert not [file for file in folder.rglob("*") if file.is_file()]
    fit = run(Wire(nodes, CONFIG), checkpoint=folder)
    assert fit.solution.status is ct.Status.RELEASED
    with pytest.raises(ct.InvalidInput, match="another run: its clip is"):  # what was released stays
        run(Wire(nodes, wrong), wrong, checkpoint=folder)


def test_levels_that_no_row_has_are_refused_before_anything_is_spent(tmp_path, caplog):
    from coterie.federated.runtimes.in_process import LocalNodes
    from coterie.federated.sources import Table

    rng = np.random.default_rng(0)
    frame = polars.DataFrame({"who": ["a", "b"] * 40, "saturday": [k % 3 == 0 for k in range(80)],
                              "y": rng.normal(size=80)})
    for levels, good in (("no|yes", False), ("false|true", True)):
        config = {"epsilon": 8.0, "user": "who", "target": "y", "clip": f"saturday={levels}, y=-3:3"}
        deployment = Deployment.of(config)
        nodes = LocalNodes([Table(frame=frame, user="who", target="y")])
        if good:
            assert fit_federation(nodes, deployment, deployment.fit, None, deployment.privacy).n_clusters
            continue
        with pytest.raises(ct.InvalidInput, match=r"levels 'no', 'yes' is .*which has 'false', 'true'.*saturday"):
            fit_federation(nodes, deployment, deployment.fit, None, deployment.privacy)
        assert nodes.keeper.spending(1e-5) == {}
        frame.write_csv(tmp_path / "t.csv")  # a node says nothing of its rows, but to its owner
        own = {"data": "csv", "path": str(tmp_path / "t.csv"), "user": "who", "target": "y", "budget-delta": 1e-5,
               "ledger-dir": str(tmp_path / "ledger"), "budget-epsilon": 8.0}
        assert run(Wire([own], config), config).n_clusters
        assert "None of the levels 'no', 'yes'" in caplog.text

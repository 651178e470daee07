"""Run folders from Python: a loaded run predicts and certifies as its fit did, and changes are found."""

from __future__ import annotations

import csv
import json
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import coterie as ct
from coterie.fitting import Settings, fit
from coterie.output.runs.save import clear, table

FOLDERS = Path(__file__).parent / "folders"  # written by version 0.1.0, before there was load_run
QUICK = Settings(n_lams=3)
FILES = {"run.json", "models.csv", "models.parquet", "clusters.csv", "path.csv", "path.parquet", "report.html",
         "report.json", "solution.coterie"}


def frame_of(kind: str) -> pl.DataFrame:
    """Six users of two groups, ten rows each."""
    rng = np.random.default_rng(0)
    n = 60
    who, x, z = np.arange(n) // 10, rng.normal(size=n), rng.normal(size=n)
    t = np.where(who % 2, 1.0, -1.0) * (2 * x - z)
    y = {"regression": t + 0.1 * rng.normal(size=n),
         "binary": np.where(t + 0.3 * rng.logistic(size=n) > 0, "yes", "no"),
         "classes": np.select([t > 1, t < -1], ["high", "low"], "mid"), "counts": rng.poisson(np.exp(0.5 * t))}
    columns = {"who": [f"u{i}" for i in who], "x": 100 + 5 * x, "z": z}
    if kind == "personal":  # the same slopes, and a level of every user
        return pl.DataFrame({**columns, "y": 2 * x - z + 3.0 * rng.normal(size=6)[who] + 0.3 * rng.normal(size=n)})
    if kind == "points":
        return pl.DataFrame({"x": 4.0 * np.where(who % 2, 1, -1) + 0.1 * x, "z": 0.1 * z})
    return pl.DataFrame({**columns, "y": y[kind]})


def columns_of(kind: str) -> dict[str, str]:
    return {} if kind == "points" else {"user": "who", "target": "y"}


KINDS = ("regression", "binary", "classes", "counts", "points", "personal")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A fit of every kind, with its file and its folder, made once."""
    known: dict[str, tuple[ct.Fit, Path]] = {}

    def make(kind: str) -> tuple[ct.Fit, Path]:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            frame_of(kind).write_csv(folder / "data.csv")
            known[kind] = ct.fit_table(folder / "data.csv", **columns_of(kind), settings=QUICK,
                                       folder=folder / "run"), folder
        return known[kind]

    return make


@pytest.fixture
def copied(made, tmp_path, monkeypatch):
    """A run to change: `data.csv` and `run` in the working folder."""
    shutil.copytree(made("regression")[1], tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return Path("run")


def test_a_run_keeps_its_warnings(made, tmp_path):
    fitted, _ = made("regression")
    worse = replace(fitted, scores=replace(fitted.scores, alone=fitted.scores.fitted / 2))
    assert len(worse.warnings) == 1
    run = ct.load_run(ct.save_run(worse, tmp_path / "worse"))
    assert run.warnings == worse.warnings
    assert json.loads((tmp_path / "worse" / "run.json").read_text())["warnings"] == list(worse.warnings)
    assert worse.warnings[0] in json.loads((tmp_path / "worse" / "report.json").read_text())["warnings"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_run_is_the_fit(made, kind):
    fitted, folder = made(kind)
    run = ct.load_run(folder / "run")
    parts = () if fitted.average is None else fitted.average.parts
    assert {file.name for file in (folder / "run").iterdir()} == FILES | ({"average.coterie"} if parts else set())
    assert (run.average is None) == (not parts)
    assert (run.n_clusters, run.lam, run.gap, run.why) == (fitted.n_clusters, fitted.lam, fitted.gap, fitted.why)
    assert run.status is fitted.solution.status
    assert run.warnings == fitted.warnings == ()
    assert run.names == fitted.names
    np.testing.assert_array_equal(run.labels, fitted.labels)
    np.testing.assert_array_equal(run.models, fitted.models)
    np.testing.assert_array_equal(run.solved, fitted.solution.models)
    assert run.kind == fitted.kind
    np.testing.assert_array_equal(run.coefficients, fitted.coefficients)
    assert run.settings == fitted.settings
    assert run.recipe == fitted.recipe
    assert [row["lam"] for row in run.path] == fitted.path.lams.tolist()
    assert (run.scores is None) == (fitted.scores is None) == (kind == "points")


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_and_its_run_predict_and_certify_the_same(made, kind):
    fitted, folder = made(kind)
    run = ct.load_run(folder / "run")
    for data in (folder / "data.csv", frame_of(kind)):
        assert fitted.predict(data).equals(run.predict(data))
    predictions = run.predict(folder / "data.csv")
    assert predictions.columns[:3] == ["user", "known", "cluster"]
    assert predictions["known"].to_list() == [1] * len(frame_of(kind))
    target = {"regression": pl.Float64, "counts": pl.Float64, "binary": pl.String, "classes": pl.String,
              "personal": pl.Float64}
    assert kind == "points" or predictions["prediction"].dtype == target[kind]
    for proof in (fitted.certify(), run.certify(), run.certify(frame_of(kind))):
        assert isinstance(proof, ct.Certificate)
        assert proof.certified
        assert proof.holds
        assert proof.n_clusters == fitted.n_clusters
        assert proof.objective == pytest.approx(fitted.solution.objective, rel=1e-9)
    assert (run.certify().same_data, run.certify(frame_of(kind)).same_data) == (True, None)


def test_a_personal_run_keeps_its_covariance(made, tmp_path):
    """Each user has its own model around the centre that all share; without the covariance nothing is certified."""
    fitted, folder = made("personal")
    run = ct.load_run(folder / "run")
    assert (run.kind, fitted.kind) == ("personal", "personal")
    assert len(np.unique(run.models, axis=0)) == 6
    assert len(np.unique(run.solved, axis=0)) == 1
    np.testing.assert_array_equal(run.covariance, fitted.solution.problem.loss.covariance)
    assert run.certify().same_models
    other = replace(run, covariance=4.0 * run.covariance).certify()
    assert not (other.holds and other.same_models)


def test_predictions_by_hand(made):
    """models.csv times the columns of the table, in its own units."""
    _, folder = made("regression")
    with (folder / "run" / "models.csv").open() as file:
        models = {row["user"]: row for row in csv.DictReader(file)}
    frame = frame_of("regression")
    expected = [sum(float(models[row["who"]][name]) * value for name, value in (
        ("x", row["x"]), ("z", row["z"]), ("intercept", 1.0))) for row in frame.to_dicts()]
    np.testing.assert_allclose(ct.load_run(folder / "run").predict(frame)["prediction"], expected, rtol=1e-9)


def test_unknown_users_get_the_pooled_model(made):
    fitted, folder = made("regression")
    new = frame_of("regression").with_columns(who=pl.lit("nobody"))
    predictions = ct.load_run(folder / "run").predict(new)
    assert predictions["known"].to_list() == [0] * 60
    assert predictions["cluster"].null_count() == 60
    X = new.select("x", "z").to_numpy()
    expected = fitted.units.predict(X, np.tile(fitted.together, (60, 1)))
    np.testing.assert_allclose(predictions["prediction"], expected, rtol=1e-12)


def test_rows_that_are_users_are_known_in_their_own_file_only(made):
    fitted, folder = made("points")
    rows = frame_of("points")
    for run in (fitted, ct.load_run(folder / "run")):
        assert run.predict(folder / "data.csv")["known"].sum() == len(rows)
        elsewhere = run.predict(rows[::-1])
        assert elsewhere["known"].sum() == 0
        assert elsewhere["cluster"].to_list() == fitted.labels[::-1].tolist()


def test_a_report_is_written_again(made, tmp_path):
    fitted, folder = made("binary")
    run = ct.load_run(folder / "run")
    page = (folder / "run" / "report.html").read_bytes()
    assert run.report() == folder / "run" / "report.html"
    assert (folder / "run" / "report.html").read_bytes() == page
    assert fitted.report(tmp_path / "fit.html").read_bytes() == page
    other = run.report(tmp_path / "other.html", title="Six & more")
    assert "Six &amp; more" in other.read_text()
    assert "coterie fit" in json.loads((folder / "run" / "report.json").read_text())["command"]


def test_a_fit_can_be_saved_later(made, tmp_path):
    fitted, folder = made("regression")
    saved = fitted.save(tmp_path / "again")
    for name in FILES - {"run.json"}:
        assert (saved / name).read_bytes() == (folder / "run" / name).read_bytes()
    first, second = (json.loads((location / "run.json").read_text()) for location in (folder / "run", saved))
    assert first == second


# ---- fits and solutions without a table


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_fit_of_users_is_saved_and_loaded(tmp_path, task):
    frame = frame_of("regression" if task == "regression" else "classes")
    y = frame["y"].to_numpy() if task == "regression" else np.unique(frame["y"], return_inverse=True)[1].astype(float)
    users = ct.Users.from_arrays(frame.select("x", "z"), y, frame["who"])
    fitted = fit(users, Settings(task=task, n_lams=3, holdout=0.0))
    run = ct.load_run(fitted.save(tmp_path / "run"))
    assert run.predict(users).equals(fitted.predict(users))
    if task == "classification":
        assert set(run.predict(users)["prediction"]) <= {0, 1, 2}
    proof = run.certify(users)
    assert proof.holds
    assert proof.same_data is None
    with pytest.raises(ct.InvalidInput, match="made from Users"):
        run.predict(frame)
    with pytest.raises(ct.InvalidInput, match="made from Users"):
        fitted.predict(frame)
    with pytest.raises(ct.InvalidInput, match="not made from a file"):
        run.certify()
    with pytest.raises(ct.InvalidInput, match="Give the same, in this order"):
        run.predict(ct.Users.from_arrays(frame.select("z", "x"), y, frame["who"]))


def test_a_solution_is_saved_and_loaded(tmp_path):
    users = ct.Users.from_arrays([[0.0, 0.0], [0.1, 0.0], [5.0, 1.0]])
    solution = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=0.1))
    run = ct.load_run(ct.save_run(solution, tmp_path / "run", settings={"source": "by hand"}, title="Three points"))
    np.testing.assert_array_equal(run.models, solution.models)
    np.testing.assert_array_equal(run.duals, solution.duals)
    np.testing.assert_array_equal(run.labels, solution.labels)
    assert run.info["settings"] == {"source": "by hand"}
    assert "Three points" in run.report().read_text()
    for use in (run.certify, lambda: run.predict(users), lambda: run.coefficients):
        with pytest.raises(ct.InvalidInput, match="not a run of `coterie fit`"):
            use()
    with pytest.raises(ct.InvalidInput, match="holds no path"):
        _ = run.path
    with pytest.raises(ct.InvalidInput, match="expected a Fit or a Solution"):
        ct.save_run("solution", tmp_path / "other")  # type: ignore[arg-type]


def test_a_federated_run_is_saved_and_loaded(tmp_path):
    frame = frame_of("regression")
    users = ct.Users.from_arrays(frame.select("z"), frame["y"], frame["who"])
    federated = ct.federate(users, ct.Squared(ridge=1e-3), lam=0.1)
    run = ct.load_run(ct.save_run(federated, tmp_path / "run"))
    np.testing.assert_array_equal(run.models, federated.models)
    assert run.info["n_rounds"] == federated.n_rounds
    assert (tmp_path / "run" / "ledger.csv").exists()
    again = run.solution(users, ct.Squared(ridge=1e-3))
    assert (again.gap, again.objective) == (pytest.approx(federated.gap, abs=1e-9), pytest.approx(federated.objective))
    with pytest.raises(ct.InvalidInput):
        run.solution(users.take([0, 1]), ct.Squared(ridge=1e-3))
    assert json.loads((tmp_path / "run" / "report.json").read_text())["federated"]["rounds"]


def test_a_run_is_saved_beside_its_checkpoint(tmp_path):
    frame = frame_of("regression")
    users = ct.Users.from_arrays(frame.select("z"), frame["y"], frame["who"])
    federated = ct.federate(users, ct.Squared(ridge=1e-3), lam=0.1, checkpoint=tmp_path / "run" / "checkpoint")
    ct.save_run(federated, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint" / "state.coterie").exists()
    assert ct.load_run(tmp_path / "run").n_clusters == federated.n_clusters
    (tmp_path / "other" / "checkpoint").mkdir(parents=True)
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ct.InvalidInput, match="holds other files"):
        ct.save_run(federated, tmp_path / "other")


# ---- folders that are in use


def test_a_finished_run_is_not_overwritten_by_accident(copied):
    before = {file: (copied / file).read_bytes() for file in FILES}
    fitted = ct.fit_table("data.csv", user="who", target="y", settings=Settings(n_lams=2, holdout=0.0))
    for use in (lambda: fitted.save(copied), lambda: ct.save_run(fitted.solution, copied),
                lambda: ct.fit_table("data.csv", user="who", target="y", settings=QUICK, folder=copied),
                lambda: ct.fit_table("data.csv", user="who", target="y", settings=QUICK, folder=copied, resume=True)):
        with pytest.raises(ct.InvalidInput, match=r"run holds a finished run.*--overwrite.*overwrite=True"):
            use()
    assert {file: (copied / file).read_bytes() for file in FILES} == before
    ct.save_run(fitted.solution, copied, overwrite=True)
    assert {file.name for file in copied.iterdir()} == FILES - {"path.csv", "path.parquet"}  # nothing of the old run
    fitted.save(copied, overwrite=True)
    assert ct.load_run(copied).settings == fitted.settings


def test_folders_of_others_are_left_alone(tmp_path):
    users = ct.Users.from_arrays([[0.0], [1.0]])
    solution = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=0.1))
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ct.InvalidInput, match="holds other files"):
            ct.save_run(solution, tmp_path, overwrite=overwrite)
        with pytest.raises(ct.InvalidInput, match="is a file"):
            ct.save_run(solution, tmp_path / "notes.txt", overwrite=overwrite)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_json_of_others_is_not_cleared(tmp_path):
    (tmp_path / "path.csv").write_text("mine")
    for text, left in (("{}", {"run.json", "path.csv"}), ('{"coterie": "0.1.0"}', set())):
        (tmp_path / "run.json").write_text(text)
        clear(tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == left


def test_an_interrupted_fit_continues_from_its_folder(tmp_path):
    frame = frame_of("regression")

    def stop(what: str, *_: object) -> None:
        if what == "centres of the groups":
            raise KeyboardInterrupt

    def run(folder: str, **more: object) -> ct.Fit:
        return ct.fit_table(frame, user="who", target="y", settings=QUICK, folder=tmp_path / folder, **more)

    with pytest.raises(ct.Interrupted):
        run("cut", progress=stop)
    assert {file.name for file in (tmp_path / "cut").iterdir()} == {"progress"}
    seen: list[str] = []
    run("cut", resume=True, progress=lambda what, *_: seen.append(what))
    assert "searching for groups" not in seen
    assert "centres of the groups" in seen
    run("uncut")
    for name in FILES - {"run.json"}:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "uncut" / name).read_bytes()


# ---- changed folders


@pytest.mark.parametrize(("keys", "value", "refused"), [
    (["lam"], 10.0, False), (["n_clusters"], 3, False), (["settings", "ridge"], 0.1, False),
    (["settings", "standardize"], False, False), (["settings", "loss"], "poisson", True),
    (["lam"], "x", True), (["lam"], None, True), (["settings"], None, True), (["settings", "tol"], "small", True),
    (["recipe", "columns"], [], True), (["recipe", "user"], 3, True), (["recipe"], 7, True),
    (["units", "mean"], [0.0], True), (["units", "task"], "magic", True), (["units"], {}, True),
    (["fingerprint"], None, True), (["pooled"], [1.0], True), (["settings", "data"], 4, True),
    (["recipe", "task"], "counts", True),
])
def test_a_changed_run_json_is_found(copied, keys, value, refused):
    assert ct.load_run(copied).certify().holds
    info = json.loads((copied / "run.json").read_text())
    inside = info
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = value
    (copied / "run.json").write_text(json.dumps(info))
    if refused:
        with pytest.raises(ct.InvalidInput):
            ct.load_run(copied).certify("data.csv")
    else:
        assert not ct.load_run(copied).certify("data.csv").holds


def change(path: Path, line: int, column: int, to: object) -> None:
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    rows[line][column] = str(to)
    path.write_bytes(table(rows[0], rows[1:]))


def test_changed_models_are_found(copied):
    models = (copied / "models.csv").read_bytes()
    change(copied / "models.csv", 1, 2, 123.0)
    proof = ct.load_run(copied).certify()
    assert not proof.certified
    (copied / "models.csv").write_bytes(models)
    change(copied / "models.csv", 1, 1, 7)  # the label of a group only
    proof = ct.load_run(copied).certify()
    assert (proof.certified, proof.same_claims, proof.holds) == (True, False, False)
    for column, value, complaint in ((0, "u5", "each once"), (2, "nan", "models"), (2, "", "cannot be read")):
        (copied / "models.csv").write_bytes(models)
        change(copied / "models.csv", 1, column, value)
        with pytest.raises(ct.InvalidInput, match=complaint):
            ct.load_run(copied).certify()
    (copied / "models.csv").unlink()
    with pytest.raises(ct.InvalidInput, match=r"models\.csv"):
        ct.load_run(copied).certify()


def test_other_data_are_found(copied):
    frame = pl.read_csv("data.csv")
    frame.with_columns(y=pl.col("y") + (pl.int_range(60) == 3)).write_csv("data.csv")
    proof = ct.load_run(copied).certify("data.csv")
    assert (proof.same_data, proof.holds) == (False, False)
    frame[10:].write_csv("data.csv")
    with pytest.raises(ct.InvalidInput, match="other users than the run"):
        ct.load_run(copied).certify("data.csv")
    os.unlink("data.csv")
    with pytest.raises(ct.InvalidInput, match=r"data\.csv"):
        ct.load_run(copied).certify("data.csv")
    assert ct.load_run(copied).certify(frame).holds


@pytest.mark.parametrize("name", ["run.json", "solution.coterie", "report.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b"\xff\xfe", None])
def test_a_damaged_folder_is_refused(copied, name, content):
    (copied / name).write_bytes(content) if content is not None else (copied / name).unlink()
    with pytest.raises(ct.InvalidInput):
        ct.load_run(copied).report() if name == "report.json" else ct.load_run(copied).predict("data.csv")


# ---- folders of version 0.1.0


def test_a_fit_of_an_older_version_is_read(tmp_path, monkeypatch):
    shutil.copytree(FOLDERS, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    run = ct.load_run("fit")
    assert run.settings is not None
    assert (run.settings.max_groups, run.settings.loss, run.n_clusters) == (4, "squared_hinge", 2)
    assert [row["n_clusters"] for row in run.path][-1] == 1
    with Path("fit/predictions.csv").open() as file:
        expected = list(csv.DictReader(file))
    assert [{name: str(value) for name, value in row.items()} for row in run.predict("data.csv").to_dicts()] == expected
    proof = run.certify()
    assert proof.same_data
    assert proof.holds
    assert proof.objective == pytest.approx(run.info["objective"], rel=1e-9)
    assert "2 groups among 6 users" in run.report("page.html").read_text()


def test_a_federated_run_of_an_older_version_is_read():
    run = ct.load_run(FOLDERS / "federated")
    assert (run.n_clusters, len(run.names), run.lam, run.info["n_rounds"]) == (1, 4, 0.3, 2)
    assert run.status is ct.Status.CONVERGED
    assert run.settings is None
    with pytest.raises(ct.InvalidInput, match="not a run of `coterie fit`"):
        run.certify()


def test_every_setting_has_its_default_in_one_list():
    """The command and the estimators take the defaults of `Settings`."""
    from typer.main import get_command

    from coterie.cli import app

    options = {option.name: option.default for option in get_command(app).commands["fit"].params}  # type: ignore[attr-defined]
    estimator = ct.PersonalizedClassifier().get_params()
    defaults = {field.name: field.default for field in fields(Settings)}
    for name in ("loss", "lam", "weights", "ridge", "n_lams", "tol", "holdout", "standardize", "seed"):
        assert options[name] == defaults[name]
    for name in ("loss", "lam", "weights", "ridge", "n_lams", "k", "tol", "standardize"):
        assert estimator[name] == defaults[name]
    assert (options["max_groups"] or None, estimator["most"]) == (defaults["max_groups"],) * 2


def test_models_that_run_off_to_infinity_are_certified_by_their_losses(tmp_path):
    (tmp_path / "table.csv").write_text("who,x,y\na,0,0\na,1,1\n")
    fitted = ct.fit_table(tmp_path / "table.csv", user="who", target="y", folder=tmp_path / "run",
                          settings=ct.fitting.Settings(ridge=0.0))
    assert np.abs(fitted.models).max() > 100.0
    assert ct.load_run(tmp_path / "run").certify().holds
    models = tmp_path / "run" / "models.csv"
    models.write_text(models.read_text().replace("a,0,", "a,0,-"))  # these separate the classes the other way
    assert not ct.load_run(tmp_path / "run").certify().same_models

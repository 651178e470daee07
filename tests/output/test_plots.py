"""Figures have what they should, and the data behind them are right."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from support.paths import halving, made_path

import coterie as ct
from coterie import plots
from coterie.datasets import clustered, ellipses
from coterie.fitting import Settings, fit
from coterie.output.plots.base import lam_positions, looks_of

LAMS = [0.01, 0.1, 1.0, 10.0]
SIX = [[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]]


@pytest.fixture(scope="module")
def fitted():
    data = clustered("logistic", n_users=12, n_clusters=2, samples=60, n_features=3, separation=4.0, seed=0)
    return fit(replace(data.users, targets=(data.users.targets + 1) / 2), Settings(task="classification", n_lams=12))


@pytest.fixture(scope="module")
def run():
    users = ellipses(users_per_cluster=4, seed=0).users
    return ct.federate(users, ct.SquaredHinge(ridge=1e-3), 0.4, participation=0.5, seed=0)


def png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream)
    return stream.getvalue()


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


# Data


@pytest.mark.parametrize("dim", [4, 1500])
def test_planted_directions_are_found(dim):
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.standard_normal((dim, 2)))[0].T
    axes *= np.sign(axes[[0, 1], np.abs(axes).argmax(axis=1)])[:, None]
    places = rng.standard_normal((3, 20, 2)) * [3.0, 1.0]
    places -= places.mean(axis=(0, 1))
    turn = np.linalg.svd(places.reshape(-1, 2), full_matrices=False)[2]  # the plane's own principal directions
    projection = plots.project(places @ turn.T @ axes + rng.standard_normal(dim))
    np.testing.assert_allclose(projection.points, places @ turn.T, atol=1e-8)
    variance = ((places @ turn.T) ** 2).sum(axis=(0, 1))
    np.testing.assert_allclose(projection.shares, variance / variance.sum())


def test_one_map_serves_all_lams():
    models = np.random.default_rng(0).standard_normal((5, 8, 6))
    both = plots.project(models).points
    np.testing.assert_allclose(plots.project(models[::-1]).points, both[::-1], atol=1e-10)
    assert np.abs(plots.project(models[:1]).points - both[:1]).max() > 0.1  # each lam by itself would jump


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 5), (2, 3, 1), (1, 1, 1200)])
def test_equal_models_lie_at_the_origin(shape):
    points, shares = plots.project(np.full(shape, 3.0))
    assert points.shape == (*shape[:2], 2)
    assert not points.any()
    assert not shares.any()


def test_a_tree_is_laid_out():
    linkage = np.array([[0, 2, 0.1, 2], [1, 3, 0.2, 2], [4, 5, 1.0, 4]])
    laid = plots.branches(linkage)
    assert laid.order.tolist() == [0, 2, 1, 3]
    assert laid.positions.tolist() == [0, 2, 1, 3, 0.5, 2.5, 1.5]
    assert laid.heights.tolist() == [0, 0, 0, 0, 0.1, 0.2, 1.0]
    assert laid.parents.tolist() == [4, 5, 4, 5, 6, 6, -1]


def test_a_chain_of_many_is_laid_out():
    path = made_path(np.stack([np.arange(3000), np.zeros(3000, dtype=int)]), [0.1, 1.0])
    assert sorted(plots.branches(path.linkage).order) == list(range(3000))


def test_the_longest_clustering_is_looked_at():
    path = made_path(SIX, LAMS)
    view = plots.View.of(path)
    assert (view.index, view.chosen) == (1, False)
    assert plots.View.of(path, 3).chosen
    assert plots.longest(made_path(SIX[:1], [0.5])) == 0
    for index in (-1, 4):
        with pytest.raises(ct.InvalidInput, match="from 0 to 3"):
            plots.View.of(path, index)
    with pytest.raises(ct.InvalidInput, match="got list"):
        plots.View.of([])


def test_a_solution_takes_its_place_on_a_path():
    path = made_path(SIX, LAMS)
    between = replace(path[1], problem=path.problem.with_lam(0.5))
    view = plots.View.of(between, path=path)
    assert view.path.lams.tolist() == [0.01, 0.1, 0.5, 1.0, 10.0]
    assert view.solution is between
    same = plots.View.of(replace(path[2]), path=path)
    assert len(same.path) == 4
    assert same.index == 2


def test_zero_lies_left_of_the_rest():
    assert lam_positions(np.array([0.0, 0.3, 1.0])).tolist() == pytest.approx([0.1, 0.3, 1.0])
    assert lam_positions(np.zeros(1)).tolist() == [1.0]


# Figures


def test_the_path_that_proposed_the_groups_is_drawn_to_its_end(fitted):
    """Its weights know nothing of groups, so merges above the chosen lam are drawn, too."""
    assert fitted.path[-1].n_clusters == 1
    assert fitted.chosen < len(fitted.path) - 1
    assert plots.View.of(fitted).path.lams.tolist() == fitted.path.lams.tolist()
    for figure in (plots.tree(fitted), plots.clusters(fitted), plots.gaps(fitted)):
        assert figure.axes[0].get_xlim()[1] > fitted.path.lams[-1]
    lines = next(c for c in plots.tree(fitted).axes[0].collections if isinstance(c, LineCollection))
    assert sum(s[0, 1] != s[1, 1] for s in lines.get_segments()) == 12 - 1
    given = fit(fitted.solution.problem.users.data, replace(
        fitted.settings, task="regression", weights="unit", lam=0.05, n_lams=3, holdout=0.0))
    assert plots.View.of(given).path.lams.tolist() == given.path.lams.tolist()


def test_models_that_predict_are_drawn(fitted):
    view = plots.View.of(fitted)
    np.testing.assert_allclose(view.models[view.index], fitted.models)
    np.testing.assert_allclose(view.centres(view.index), fitted.centres)
    np.testing.assert_array_equal(fitted.models, fitted.solution.models)  # the certificate is theirs
    assert not np.allclose(fitted.models, fitted.path[fitted.chosen].models, rtol=1e-4)


def test_the_tree_has_every_user_and_merge(fitted):
    figure = plots.tree(fitted.path, index=fitted.chosen)
    axes, n = figure.axes[0], 12
    lines = next(c for c in axes.collections if isinstance(c, LineCollection))
    assert len(lines.get_segments()) == 2 * n - 1 + n - 1
    assert len(axes.get_yticks()) == n
    assert axes.get_xscale() == "log"
    assert axes.lines[0].get_xdata()[0] == fitted.solution.lam
    assert legend(figure)[:2] == ["group 1: 6 users", "group 2: 6 users"]
    # Every horizontal line goes from where a node is made to where it is joined.
    ends = sorted(s[1, 0] for s in lines.get_segments()[: 2 * n - 1])
    joins = np.repeat(fitted.path.linkage[:, 2], 2)
    np.testing.assert_allclose(ends[:-1], np.sort(joins))


def test_what_never_joins_is_left_apart():
    figure = plots.tree(made_path(SIX[:3], LAMS[:3]))
    lines = next(c for c in figure.axes[0].collections if isinstance(c, LineCollection))
    assert len(lines.get_segments()) == 6 + 3 + 3  # users, and three merges with their lines across
    assert figure.axes[0].get_legend() is None  # nothing was chosen


def test_clusters_are_counted_and_the_window_is_shaded():
    path = made_path(SIX, LAMS)
    bounds = ct.RecoveryBounds(kind="solution", lam=0.1, lower=0.05, upper=2.0, lower_users=None, upper_clusters=None,
                               exact=True)
    axes = plots.clusters(path, bounds=bounds, index=1).axes[0]
    assert axes.lines[0].get_ydata().tolist() == [6, 3, 3, 1]
    assert axes.lines[0].get_xdata().tolist() == LAMS
    box = axes.patches[0].get_extents().transformed(axes.transData.inverted())
    assert (box.x0, box.x1) == pytest.approx((0.05, 2.0))
    assert not plots.clusters(path).axes[0].patches
    assert not plots.clusters(path, bounds=replace(bounds, lower=3.0)).axes[0].patches


def test_gaps_without_a_bound_are_crosses():
    path = made_path(SIX, LAMS)
    none = replace(path[1], certificate=replace(path[1].certificate, bound=-np.inf))
    figure = plots.gaps(replace(path, solutions=(path[0], none, *path.solutions[2:])))
    assert len(figure.axes[0].lines[0].get_xdata()) == 3
    assert figure.axes[0].collections[0].get_offsets()[:, 0].tolist() == [0.1]
    assert legend(figure) == ["certified", "tolerance 1e-06", "no bound"]


def test_users_with_one_model_are_one_dot():
    figure = plots.model_map(made_path(SIX, LAMS))
    axes = figure.axes[0]
    dots = [c for c in axes.collections if not isinstance(c, LineCollection)]
    assert len(dots) == 3
    assert [t.get_text() for t in axes.texts] == ["3", "2"]
    assert legend(figure) == ["group 1: 3 users", "group 2: 2 users", "1 user with own model"]
    sizes = [d.get_sizes()[0] for d in dots]
    assert sizes == sorted(sizes, reverse=True)
    assert len(next(c for c in axes.collections if isinstance(c, LineCollection)).get_segments()) == 6


def test_more_clusters_than_colours_differ_in_shape():
    labels = np.repeat(np.arange(20), 2)
    figure = plots.model_map(made_path([labels], [0.1]))
    looks = looks_of(labels)
    assert len({(look.colour, look.shape) for look in looks}) == 20
    assert legend(figure)[-1] == "and 10 groups more"


def test_scores_show_every_user_and_the_means(fitted):
    axes = plots.scores(fitted).axes[0]
    dots, means = axes.collections[1::3], axes.collections[2::3]
    for kind, row, dot, mean in zip(("fitted", "alone", "together"), range(3), dots, means, strict=True):
        values = getattr(fitted.scores, kind)
        assert len(dot.get_offsets()) == np.isfinite(values).sum()
        assert mean.get_offsets()[0].tolist() == pytest.approx([np.nanmean(values), row])
    with pytest.raises(ct.Incompatible, match="holdout"):
        plots.scores(replace(fitted, scores=None))


def test_coefficients_are_in_the_units_given(fitted):
    axes = plots.coefficients(fitted).axes[0]
    first = np.unique(fitted.labels, return_index=True)[1]
    expected = fitted.coefficients[first, :, 0].T
    assert [t.get_text() for t in axes.texts] == [f"{v:.2g}" for v in expected.ravel()]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["x0", "x1", "x2", "intercept"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1\n(6)", "2\n(6)"]


def test_many_coefficients_are_those_that_differ():
    path = made_path([[0, 0, 1, 1]], [0.1], dim=40)
    axes = plots.coefficients(path).axes[0]
    assert len(axes.get_yticklabels()) == 30
    assert axes.get_title(loc="left") == "30 of 40 coefficients"


def test_curves_are_those_of_predictions():
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(12), 24)
    x, z = rng.uniform(0, 4, len(who)), rng.uniform(0, 4, len(who))
    y = 3 * np.sin(1.5 * x) + z + rng.normal(0, 1, 12)[who] + rng.normal(0, 0.2, len(who))
    users = ct.Users.from_arrays(np.column_stack([x, z]), y, [f"u{k:02d}" for k in who], feature_names=("x", "z"))
    curved = fit(users, Settings(task="regression", n_lams=4, holdout=0.0))
    bent, straight = plots.curves(curved, user="u03").axes
    assert [axes.get_title(loc="left") for axes in (bent, straight)] == ["bends", "straight"]
    every, one = bent.lines[-2:]
    assert np.std(every.get_ydata() - 3 * np.sin(1.5 * every.get_xdata())) < 0.4
    rows = np.column_stack([one.get_xdata(), np.full(len(one.get_xdata()), z.mean())])
    own = ct.Users.from_arrays(rows, None, ["u03"] * len(rows), feature_names=("x", "z"))
    np.testing.assert_allclose(one.get_ydata(), curved.predict(own)["prediction"].to_list(), rtol=1e-9)
    with pytest.raises(ct.InvalidInput, match="no user 'nobody'"):
        plots.curves(curved, user="nobody")
    with pytest.raises(ct.Incompatible, match="straight"):
        plots.curves(fit(users, Settings(task="regression", n_lams=4, holdout=0.0, average="off")))


def test_rounds_add_up_to_the_ledger(run):
    upper, lower = plots.rounds(run).axes
    assert [line.get_ydata()[-1] * 1e3 for line in lower.lines] == [run.ledger.bytes_up, run.ledger.bytes_down]
    assert upper.lines[-1].get_ydata()[-1] == pytest.approx(max(run.gap, 1e-17))
    with pytest.raises(ct.Incompatible, match="no rounds"):
        plots.rounds(replace(run, history=()))


def test_separators_are_for_lines(run):
    axes = plots.separators(run).axes[0]
    assert len(axes.lines) == run.n_clusters
    with pytest.raises(ct.Incompatible, match="two features"):
        plots.separators(made_path(SIX, LAMS)[0])


@pytest.mark.parametrize("path", [
    made_path([[0]], [0.0]), made_path([[0], [0]], [0.0, 0.1]), made_path(SIX, [0.0, 0.1, 0.2, 0.3], dim=1),
    made_path(halving(1000, 10), np.geomspace(1e-3, 1, 10), dim=21), made_path(halving(40, 4)[1:2], [0.1], dim=2),
], ids=["one user", "one user, two lams", "a line", "a thousand users", "one lam"])
@pytest.mark.parametrize("name", ["tree", "clusters", "gaps", "model_map", "coefficients"])
def test_figures_of_any_size(path, name):
    assert png(getattr(plots, name)(path)).startswith(b"\x89PNG")


# In notebooks


def test_a_solution_is_a_table():
    names = ["<script>alert(1)</script>", *(f"user {k}" for k in range(39))]
    path = made_path([np.arange(40) // 2, np.arange(40) // 8], [0.1, 0.2], names=names)
    page = path[1]._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;, user 0, user 1, user 2, user 3, ..." in page
    assert page.count("<tr>") == 1 + 5
    assert "5 groups of 40 users at lam = 0.2" in page
    assert ct.Status.CONVERGED.value in page
    assert "in 8 more groups" in path[0]._repr_html_()


def test_a_path_is_a_table_with_a_picture():
    page = made_path(SIX, LAMS)._repr_html_()
    assert "from 0.01 to 10; 6 to 1 group of 6 users" in page
    assert page.count("<tr>") == 1 + 4
    points = page.split('points="')[1].split('"')[0].split()
    assert (points[0], points[-1]) == ("2.0,2.0", "238.0,38.0")
    assert made_path(halving(8, 50), np.geomspace(0.1, 1, 50))._repr_html_().count("<tr>") == 1 + 12
    assert "nan" not in made_path([[0]], [0.0])._repr_html_()


def test_a_fit_shows_its_scores(fitted):
    page = replace(fitted, why="<b>because</b>")._repr_html_()
    assert "&lt;b&gt;because" in page
    assert str(fitted.scores) in page
    assert page.count("<table>") == 2
    assert str(fitted.scores) not in replace(fitted, scores=None)._repr_html_()


# On axes of the caller


def test_figures_are_drawn_on_given_axes(fitted):
    """Each figure of one axes leaves on given axes what it has on its own: the same lines, dots, texts and labels."""
    solution = ct.solve(ct.Problem(ellipses(seed=0).users, ct.SquaredHinge(ridge=1e-3), lam=0.05))
    for draw, source in ((plots.tree, fitted), (plots.clusters, fitted), (plots.gaps, fitted), (plots.scores, fitted),
                         (plots.model_map, fitted), (plots.coefficients, fitted), (plots.separators, solution)):
        mine = Figure()
        left, right = mine.subplots(1, 2)
        assert draw(source, ax=right) is mine
        assert mine.axes == [left, right]
        assert not left.has_data()
        own = draw(source).axes[0]
        for part in ("get_xlabel", "get_ylabel", "get_xscale", "get_yscale"):
            assert getattr(right, part)() == getattr(own, part)()
        for part in ("lines", "collections", "texts", "images"):
            assert len(getattr(right, part)) == len(getattr(own, part))
        assert right.has_data()
        with pytest.raises(ct.InvalidInput, match="ax must be axes of Matplotlib, got Figure"):
            draw(source, ax=mine)


def test_figures_of_several_axes_take_a_figure(run):
    mine = Figure()
    above, below = mine.subfigures(2, 1)
    assert plots.rounds(run, figure=below) is below
    assert len(below.axes) == len(mine.axes) == 2
    assert len(above.axes) == 0
    assert plots.rounds(run).axes[1].get_ylabel() == below.axes[1].get_ylabel()
    with pytest.raises(ct.InvalidInput, match="figure must be a figure of Matplotlib, got"):
        plots.rounds(run, figure=below.axes[0])

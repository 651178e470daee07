"""Embeddings from arrays, tensors and files, and from an encoder with a cache."""

from __future__ import annotations

import builtins
import os

import numpy as np
import polars as pl
import pytest

import coterie as ct
from coterie import embeddings as em

ROWS = np.array([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0], [1.0, 2.0, 2.0], [0.5, -1.0, 2.5]], dtype=np.float32)
TARGET, USER = [0, 1, 1, 0], ["bob", "ann", "bob", "ann"]
ORDER = [1, 3, 0, 2]  # of the rows, users sorted


class Tensor:
    """What torch tensors do, without torch."""

    dtype = "torch.float32"

    def __init__(self, values):
        self.values = np.asarray(values)

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return self.values


def files(folder):
    """The same rows in every way."""
    np.save(folder / "rows.npy", ROWS)
    np.savez(folder / "rows.npz", embedding=ROWS, target=TARGET, user=USER)
    columns = {"user": USER, "target": TARGET}
    pl.DataFrame({**columns, "embedding": ROWS.tolist()}).write_parquet(folder / "lists.parquet")
    fixed = pl.Series("embedding", ROWS, dtype=pl.Array(pl.Float32, 3))
    pl.DataFrame({**columns, "embedding": fixed}).write_parquet(folder / "fixed.parquet")
    pl.DataFrame({**columns, **{f"v{j}": ROWS[:, j] for j in range(3)}}).write_parquet(folder / "columns.parquet")
    return {
        "array": lambda **o: em.from_arrays(ROWS, TARGET, USER, **o),
        "tensor": lambda **o: em.from_arrays(Tensor(ROWS), Tensor(TARGET), USER, **o),
        "npy": lambda **o: em.from_arrays(folder / "rows.npy", TARGET, USER, **o),
        **{path.name: (lambda path=path, **o: em.load(path, **o)) for path in folder.glob("*.[!n]*")},
        "npz": lambda **o: em.load(folder / "rows.npz", **o),
    }


def test_all_roads_give_the_same_users(tmp_path):
    roads = files(tmp_path)
    assert len(roads) == 7
    for name, road in roads.items():
        users = road()
        assert users.names == ("ann", "bob"), name
        np.testing.assert_array_equal(users.features, ROWS[ORDER], err_msg=name)
        assert users.targets.tolist() == [1, 0, 0, 1]
        lengths = np.linalg.norm(road(normalize=True).features, axis=1)
        assert lengths == pytest.approx([0, 1, 1, 1], abs=1e-7), name
    assert roads["array"]().feature_names == ("e0", "e1", "e2")
    assert roads["lists.parquet"]().feature_names == ("embedding[0]", "embedding[1]", "embedding[2]")


def test_every_reader_of_tables_takes_lists_of_numbers(tmp_path):
    files(tmp_path)
    read = ct.Users.from_parquet(tmp_path / "lists.parquet", user="user", target="target")
    assert read.feature_names == ("embedding[0]", "embedding[1]", "embedding[2]")
    from coterie.data.encoding import Recipe, read_table

    recipe = Recipe.learn(read_table(tmp_path / "fixed.parquet"), user="user", target="target", task="classification")
    assert recipe.feature_names == read.feature_names


@pytest.mark.parametrize(("lists", "complaint"), [
    ([[1.0, 2.0], [1.0, 2.0], [1.0]], r"all of one length.*\[1.0\] \(row 3 of .*, column 'embedding'\)"),
    ([[1.0, 2.0], None, [1.0, 2.0]], "got .* and None .*row 2 of "),
    ([["a"], ["b"], ["c"]], "lists of numbers.*row 1 of "),
    ([[1.0], [2.0], [None]], r"user 'ann', row 3 of .*, column 'embedding\[0\]'"),
    ([[], [], []], "row 1 of "),
])
def test_wrong_lists_name_the_row(tmp_path, lists, complaint):
    path = tmp_path / "rows.parquet"
    pl.DataFrame({"user": ["ann", "bob", "ann"], "embedding": lists}).write_parquet(path)
    with pytest.raises(ct.InvalidInput, match=complaint):
        em.load(path, target=None)


def test_wrong_arrays_and_names_are_refused(tmp_path):
    with pytest.raises(ct.InvalidInput, match=r"shape \(n, d\), got \(2, 3, 4\)"):
        em.from_arrays(np.ones((2, 3, 4)))
    with pytest.raises(ct.InvalidInput, match=r"NaN.*user 'ann', row 1, column 'e2'"):
        em.from_arrays([[0, 1, 2], [0, 1, np.nan]], None, ["bob", "ann"])
    files(tmp_path)
    with pytest.raises(ct.InvalidInput, match=r"no array 'users'.*'user'"):
        em.load(tmp_path / "rows.npz", user="users")
    with pytest.raises(ct.InvalidInput, match="no column 'label'"):
        em.load(tmp_path / "lists.parquet", target="label")
    with pytest.raises(ct.InvalidInput, match="cannot be read"):
        em.from_arrays(tmp_path / "nothing.npy")
    np.savez(tmp_path / "objects.npz", embedding=ROWS, user=np.array(USER, dtype=object))
    with pytest.raises(ct.InvalidInput, match="names as texts"):
        em.load(tmp_path / "objects.npz", target=None)


def test_without_torch_the_extra_is_named(monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "torch":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ct.MissingExtra, match=r"pip install 'coterie\[torch\]'"):
        em.extract(None, ROWS)


# ---- with torch, which `make test-all` installs


@pytest.fixture(scope="module")
def torch():
    try:
        import torch
    except ImportError:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs torch: pip install torch==2.13.0")
    return torch


@pytest.fixture
def encoder(torch):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 4), torch.nn.Dropout(0.5), torch.nn.ReLU())


@pytest.fixture
def images():
    return np.random.default_rng(0).normal(size=(50, 2, 3))


@pytest.mark.slow
def test_an_encoder_is_evaluated_and_left_as_it_was(torch, encoder, images):
    encoder[2].eval()
    state = torch.get_rng_state()
    seen = []
    first = em.extract(encoder, images, batch_size=7, progress=lambda done, of: seen.append((done, of)))
    assert [module.training for module in encoder.modules()] == [True, True, True, False, True]
    assert torch.equal(state, torch.get_rng_state())
    assert seen == [(50, 50)]
    encoder.eval()
    with torch.no_grad():
        expected = encoder(torch.from_numpy(images).float()).numpy()
    np.testing.assert_allclose(first, expected, rtol=1e-5)
    assert first.dtype == np.float32
    for inputs in (torch.from_numpy(images), list(images), [(image, 1) for image in images]):
        np.testing.assert_allclose(em.extract(encoder.train(), inputs), expected, rtol=1e-5)
    assert np.linalg.norm(em.extract(encoder, images, normalize=True), axis=1).max() == pytest.approx(1, abs=1e-6)
    assert em.extract(encoder.double(), images).dtype == np.float64
    assert em.extract(encoder.bfloat16(), images).dtype == np.float32
    noisy = torch.nn.Sequential(torch.nn.Flatten(), Noise(torch))
    np.testing.assert_array_equal(em.extract(noisy, images), em.extract(noisy, images))


def Noise(torch):
    class Noisy(torch.nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    return Noisy()


@pytest.mark.slow
def test_the_cache_is_used_and_never_stale(torch, encoder, images, tmp_path, monkeypatch):
    monkeypatch.setattr(em, "CHUNK", 20)
    encoded, original = [], em._Encoder.encode

    def counted(self, rows, start):
        encoded.append(len(rows))
        return original(self, rows, start)

    monkeypatch.setattr(em._Encoder, "encode", counted)

    def extract(inputs=images, module=encoder):
        encoded.clear()
        rows = em.extract(module, inputs, cache=tmp_path / "cache")
        np.testing.assert_array_equal(rows, em.extract(module, inputs))
        return sum(n for n in encoded if n > em._PROBED) - len(inputs)  # rows computed for the cache

    assert extract() == 50
    assert extract() == 0
    assert extract(images.copy()) == 0
    assert extract(np.concatenate([images, images[:10] + 1])) == 20  # the last chunk has other rows
    other = images.copy()
    other[45, 0, 0] += 1e-6
    assert extract(other) == 10
    with torch.no_grad():
        encoder[1].weight[0, 0] += 1e-3
    assert extract() == 50
    encoder[3] = torch.nn.LeakyReLU(0.1)
    assert extract() == 50
    encoder[3].negative_slope = 0.2
    assert extract() == 50
    assert extract() == 0
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:-10])
    assert extract() == 50
    assert (path.stat().st_mode & 0o777) == 0o600


@pytest.mark.slow
def test_changed_code_is_noticed(torch, images, tmp_path):
    class Encoder(torch.nn.Module):
        def forward(self, x):
            return x.flatten(1)

    before = em.extract(Encoder(), images, cache=tmp_path)
    Encoder.forward = lambda self, x: 2 * x.flatten(1)
    np.testing.assert_allclose(em.extract(Encoder(), images, cache=tmp_path), 2 * before)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("make", "complaint"), [
    (lambda nn: nn.Linear(3, 4), r"tensor of shape \(50, d\), got \(50, 2, 4\) \(rows 0 to 49\)"),
    (lambda nn: nn.Sequential(nn.Flatten(), nn.Linear(5, 4)), r"cannot take inputs of shape \(50, 6\)|\(50, 2, 3\)"),
    (lambda nn: nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 4)), r"got \(100, 4\)"),
    (lambda nn: nn.LSTM(3, 4), "got tuple"),
    (lambda nn: 3, "must be a torch.nn.Module, got int"),
])
def test_an_encoder_that_does_not_fit_is_refused(torch, images, make, complaint):
    with pytest.raises(ct.InvalidInput, match=complaint):
        em.extract(make(torch.nn), images)


@pytest.mark.slow
def test_inputs_that_do_not_fit_are_named(torch, encoder, images):
    images[31, 1, 1] = np.nan
    with pytest.raises(ct.InvalidInput, match=r"NaN.*\(row 31\)"):
        em.extract(torch.nn.Flatten(), images, batch_size=8)
    with pytest.raises(ct.InvalidInput, match=r"one shape.*row 1"):
        em.extract(encoder, [images[0], images[1, :1]])
    for inputs in ([], 5):
        with pytest.raises(ct.InvalidInput, match="at least one row"):
            em.extract(encoder, inputs)

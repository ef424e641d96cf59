"""The training text, and the PyTorch side where PyTorch is installed."""

import numpy as np
import pytest

from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget, heldout_names, heldout_text
from ddtree_cupy.decode.tiny.texts import HELDOUT_DIR
from ddtree_cupy.decode.tiny.train import main
from ddtree_cupy.decode.tiny.training import corpus


@pytest.fixture
def stdlib(tmp_path):
    """A made-up standard library that holds the held-out modules, copies of them, and other files."""
    root = tmp_path / "stdlib"
    for folder in ("test", "json", "site-packages", "encodings"):
        (root / folder).mkdir(parents=True)
    for name in corpus.HELDOUT_MODULES:
        text = heldout_text(name.removesuffix(".py"))
        (root / name).write_bytes(text)
        (root / "test" / f"test_{name}").write_bytes(b"import " + name.encode() + b"\n")
    (root / "renamed.py").write_bytes(b"# a copy\n" + heldout_text("textwrap")[3000:9000].replace(b"    ", b"\t"))
    (root / "json" / "own.py").write_bytes(b"def loads(text):\n    return text\n")
    (root / "test" / "test_own.py").write_bytes(b"assert loads('1') == 1\n")
    (root / "site-packages" / "foreign.py").write_bytes(b"foreign = 1\n")
    (root / "encodings" / "table.py").write_bytes(b"table = 1\n")
    return root


def test_collect_rejects_heldout_text(stdlib, tmp_path):
    text = corpus.collect(stdlib)
    assert text.names == ("json/own.py", "test/test_own.py")
    assert text.library.tobytes() == b"def loads(text):\n    return text\n"
    text.save(tmp_path / "corpus.npz")
    loaded = corpus.Corpus.load(tmp_path / "corpus.npz")
    assert loaded.names == text.names
    np.testing.assert_array_equal(loaded.tests, text.tests, strict=True)


def test_heldout_files_are_complete():
    assert heldout_names() == sorted(name.removesuffix(".py") for name in corpus.HELDOUT_MODULES)
    assert 150_000 <= sum(len(heldout_text(name)) for name in heldout_names()) <= 250_000
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (HELDOUT_DIR / "LICENSE").read_text()


def test_train_corpus_stage_writes_the_text(stdlib, tmp_path, capsys):
    assert main(["corpus", "--work", str(tmp_path / "work"), "--stdlib", str(stdlib)]) == 0
    assert "2 files" in capsys.readouterr().out
    assert (tmp_path / "work" / "corpus.npz").exists()


def test_bundled_models_match_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch (extra `train`) is not installed")
    from ddtree_cupy import DraftTree
    from ddtree_cupy.decode.tiny.training import drafter as torch_drafter
    from ddtree_cupy.decode.tiny.training.stages import Run, load_drafter, load_target

    run = Run(HELDOUT_DIR.parent, torch.device("cpu"), compile=False)
    tokens = np.frombuffer(heldout_text("sched")[100:180], np.uint8).astype(np.int32)
    batch = torch.from_numpy(tokens).long()[None]
    target, drafter = load_target(run), load_drafter(run)
    anchors = torch.tensor([10, 40])
    with torch.inference_mode():
        torch_logits, torch_features, _ = target(batch)
        mask = torch_drafter.block_mask(anchors, 80, drafter.config)
        torch_drafts = drafter(batch, torch_features, anchors, mask)[0]

    numpy_target, numpy_drafter = TinyTarget.load(), TinyDrafter.load()
    chain = DraftTree.from_parents(tokens, np.arange(-1, 79))
    logits, features = numpy_target.forward(chain, numpy_target.allocate(0, 80))
    np.testing.assert_allclose(logits, torch_logits[0].numpy(), rtol=0, atol=2e-3)
    for anchor, expected in zip(anchors.tolist(), torch_drafts.numpy(), strict=True):
        state = numpy_drafter.observe(numpy_drafter.start(), features[:anchor])
        draft = numpy_drafter.propose(state, int(tokens[anchor]))
        np.testing.assert_allclose(draft, expected, rtol=0, atol=2e-3)

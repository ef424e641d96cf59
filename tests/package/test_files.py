"""Files that the library writes and reads: whole or not at all, and never more memory than the file is worth."""

import contextlib
import dataclasses
import io
import json
import os
import re
import stat
import subprocess
import sys
import threading
import tracemalloc
import zipfile

import numpy as np
import pytest

from ddtree_cupy import DraftTree, _files
from ddtree_cupy.cli import main
from ddtree_cupy.decode.tiny import TinyTarget
from ddtree_cupy.decode.tiny.config import DrafterConfig, TargetConfig
from ddtree_cupy.decode.tiny.drafter import DRAFTER_WEIGHTS
from ddtree_cupy.decode.tiny.weights import load_weights, save_weights
from ddtree_cupy.errors import ArgumentError, WeightsError
from ddtree_cupy.explore import CostTable, Traces, record
from ddtree_cupy.explore.__main__ import main as explore
from tests.refusals import rejects
from tests.toys import NoisyDrafter, TableTarget

CONFIG = TargetConfig(d_model=16, num_layers=1)
LOGITS = np.random.default_rng(0).standard_normal((4, 20)).astype(np.float32)


def toy_traces():
    target = TableTarget(vocab_size=40)
    return record(target, NoisyDrafter(target), [[1], [2, 3]], num_positions=5, max_budget=8, width=9, progress=False)


def toy_tree():
    return DraftTree.from_parents([9, 10, 20, 11, 21, 20], [-1, 0, 1, 0, 1, 3])


def small_weights():
    return {"norm.weight": np.ones(16, np.float16), "head.weight": np.zeros((8, 16), np.float16)}


def said_by(command, *arguments):
    """Run a command and return its exit code and what it printed on standard error."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = command([str(argument) for argument in arguments])
    return code, said.getvalue()


@pytest.fixture(params=["tree --save", "tree --svg", "weights", "traces", "cost table", "container"])
def write(request, tmp_path_factory):
    """Return a function that writes one kind of file, or raises OSError."""
    logits = tmp_path_factory.getbasetemp() / "logits.npy"
    np.save(logits, LOGITS)

    def write_tree(path):
        code, said = said_by(main, "tree", logits, request.param.split()[1], path)
        if code:
            raise OSError(said)

    return {
        "weights": lambda path: save_weights(path, "target", CONFIG, small_weights()),
        "traces": lambda path: toy_traces().save(path),
        "cost table": lambda path: CostTable.load().save(path),
        "container": lambda path: toy_tree().save(path),
    }.get(request.param, write_tree)


def test_writing_follows_links(write, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    real, link = folder / "real", tmp_path / "link"
    link.symlink_to(real)
    for _ in range(2):  # first to nothing, then to a file
        write(link)
        assert link.is_symlink()
        assert real.stat().st_size > 100
        real.write_bytes(b"old")
    assert list(folder.iterdir()) == [real]


def test_writing_into_a_fifo_feeds_its_reader(write, tmp_path):
    fifo, received = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: received.append(fifo.read_bytes()), daemon=True)
    reader.start()
    write(fifo)
    assert stat.S_ISFIFO(fifo.lstat().st_mode)
    reader.join(5)
    assert len(received[0]) > 100


def test_writing_keeps_the_mode_of_a_file(write, tmp_path):
    path = tmp_path / "private"
    path.touch(0o600)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("place", ["missing/out", "loop", "folder"])
def test_writing_names_the_path_that_was_given(write, tmp_path, place):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match=r"out|loop|folder") as caught:
        write(tmp_path / place)
    assert str(tmp_path / place) in str(caught.value)
    assert "/." not in str(caught.value)  # the name of a file written aside
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "loop").is_symlink()


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_half():
        with _files.written_whole(path) as stream:
            stream.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# Reading. Each of the four reads the `.npz` at a path and returns what it said.


def refusal_of(load, path, *about):
    with pytest.raises(WeightsError) as caught:
        load(path, *about)
    return str(caught.value)


def read_weights(path):
    return refusal_of(load_weights, path, "target", TargetConfig)


def read_traces(path):
    return refusal_of(Traces.load, path)


def read_logits(path):
    code, said = said_by(main, "tree", path)
    assert code == 1
    assert said.count("\n") == 1
    return said


def read_container(path):
    return refusal_of(DraftTree.load, path)


CHECKED = [read_weights, read_traces, read_container]  # with a header and a checksum
READERS = [*CHECKED, read_logits]


def test_reading_logits_never_waits_for_the_writer_of_a_fifo(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "ddtree_cupy", "tree", str(fifo)]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=30)
    assert found.stderr == f"ddtree: {fifo} is not a regular file, expected a .npy or .npz file\n"


def write_valid(read, path):
    """Write a file that `read` would take."""
    if read is read_weights:
        save_weights(path, "target", CONFIG, small_weights())
    elif read is read_traces:
        toy_traces().save(path)
    elif read is read_container:
        toy_tree().save(path)
    else:
        np.savez_compressed(path, draft_logits=LOGITS)


def npy(header, data=b"", version=b"\1\0"):
    text = header.encode("latin-1") + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text + data


def form(descr="'<f4'", order="False", shape="(2, 3)"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


def peak_of(read, path):
    """Return what `read` said and the most memory it held at once."""
    tracemalloc.start()
    try:
        said = read(path)
        return said, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def members_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def first_array(members):
    return next(name for name in members if name != "__header__.npy")


def spoiled(read, folder, change, compression=zipfile.ZIP_DEFLATED):
    """Return a file that `read` would take, with members added or replaced: name -> bytes."""
    path = folder / "file.npz"
    write_valid(read, path)
    members = members_of(path)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in {**members, **change(members)}.items():
            archive.writestr(name, content)
    return path


def npy_of(array):
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def header_with(members, **changes):
    """Return the member that holds the JSON header, changed."""
    header = json.loads(members["__header__.npy"].partition(b"\n")[2]) | changes
    return {"__header__.npy": npy_of(np.frombuffer(json.dumps(header).encode(), np.uint8))}


@pytest.mark.parametrize("read", READERS)
def test_reading_never_expands_an_archive_that_declares_too_much(read, tmp_path):
    path = tmp_path / "file.npz"
    write_valid(read, path)
    size = 400 << 20  # zeros: 1,000 times as long as they are in the file
    members = members_of(path)
    name = first_array(members)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for other, content in members.items():
            if other != name:
                archive.writestr(other, content)
        with archive.open(name, "w", force_zip64=True) as member:
            member.write(npy(form(shape=f"({size // 80}, 20)")))
            for _ in range(100):
                member.write(bytes(size // 100))
    assert path.stat().st_size < 1 << 20
    said, peak = peak_of(read, path)
    assert "would take 419,4" in said
    assert "expected at most 268,435,456" in said
    assert peak < 20 << 20


@pytest.mark.parametrize("read", READERS)
def test_reading_never_allocates_what_only_a_header_declares(read, tmp_path):
    path = spoiled(read, tmp_path, lambda members: {first_array(members): npy(form(shape="(100000, 100000)"))})
    said, peak = peak_of(read, path)
    assert "40,000,000,000 bytes, and holds 0" in said
    assert peak < 20 << 20


@pytest.mark.parametrize("read", CHECKED)
def test_reading_never_parses_a_header_that_is_too_long(read, tmp_path):
    lists = np.frombuffer(b"[" + b"[]," * (20 << 20) + b"[]]", np.uint8)
    said, peak = peak_of(read, spoiled(read, tmp_path, lambda members: {"__header__.npy": npy_of(lists)}))
    assert "its header is longer than 4,194,304 bytes" in said
    assert peak < 20 << 20


def test_traces_of_too_long_names_are_refused_before_a_file_is_made(tmp_path):
    traces = dataclasses.replace(toy_traces(), about={"text": "x" * (5 << 20)})
    with pytest.raises(ArgumentError, match="names and notes take"):
        traces.save(tmp_path / "file.npz")
    assert list(tmp_path.iterdir()) == []


def test_traces_whose_rows_would_take_too_much_are_refused_before_they_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "checksum", lambda about, arrays: "right")
    widths = np.zeros((1 << 18, 4), np.int32)
    widths[0, 0] = 1 << 17
    arrays = {"row_widths": widths, "token_ids": np.zeros(1 << 17, np.uint8), "logits": np.zeros(1 << 17, "f4")}
    wide = {f"{name}.npy": npy_of(array) for name, array in arrays.items()}
    path = spoiled(read_traces, tmp_path, lambda old: wide | header_with(old, vocab_size=1 << 17, sha256="right"))
    said, peak = peak_of(read_traces, path)
    assert "would take 1,099,511,627,776 bytes" in said
    assert "Traces.load(path, max_bytes=...) allows more" in said
    assert peak < 64 << 20


def test_max_bytes_of_traces_is_the_limit(tmp_path):
    path = tmp_path / "file.npz"
    toy_traces().save(path)
    with zipfile.ZipFile(path) as archive:
        needed = sum(member.file_size for member in archive.infolist())
    assert Traces.load(path, max_bytes=needed).num_prompts == 2
    with pytest.raises(WeightsError, match=f"expected at most {needed - 1:,}; "):
        Traces.load(path, max_bytes=needed - 1)


ODD_HEADERS = {
    "no dict": "[1]",
    "unfinished": "{'descr': ",
    "nested": "(" * 5000,
    "a formula": form(shape="(2, 3) * 10**9"),
    "no shape": "{'descr': '<f4', 'fortran_order': False}",
    "a shape too large for an integer": form(shape=f"({10**30}, 3)"),
    "a product beyond an integer": form(shape=f"({2**62}, 0, {2**62}, {2**62})"),
    "an extent beyond an integer": form(shape=f"(0, {10**30})"),
    "a negative extent": form(shape="(-1, 3)"),
    "a true extent": form(shape="(True, 6)"),
    "an extent of text": form(shape="('2', 3)"),
    "no tuple": form(shape="6"),
    "an order of text": form(order="'no'"),
    "objects": form(descr="'|O'"),
    "fields": form(descr="[('a', '<f4')]"),
    "many fields": form(descr="'f4,' * 9"),
    "numbers of no size": form(descr="'<U0'"),
    "numbers of another size": form(descr="'<f3'"),
    "text of 4 GB": form(descr="'<U999999999'"),
    "plain bytes": form(descr="'|V4'"),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ODD_HEADERS)
def test_reading_rejects_odd_array_headers_in_one_sentence(read, kind, tmp_path):
    path = spoiled(read, tmp_path, lambda members: {first_array(members): npy(ODD_HEADERS[kind], bytes(24))})
    assert "file.npz: " in read(path)
    if read is read_logits:
        path = tmp_path / "file.npy"
        path.write_bytes(npy(ODD_HEADERS[kind], bytes(24)))
        assert "file.npy" in read(path)


def with_version_9(members):
    name = first_array(members)
    return {name: members[name][:6] + b"\x09" + members[name][7:]}


ODD_MEMBERS = {
    "long header": lambda members: {first_array(members): npy(form() + " " * 100_000, bytes(24), b"\2\0")},
    "version 9": with_version_9,
}
COMPRESSIONS = {"bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["encrypted", "bzip2", "lzma", "twice", "long header", "version 9"])
def test_reading_rejects_odd_archives_in_one_sentence(read, kind, tmp_path):
    path = spoiled(read, tmp_path, ODD_MEMBERS.get(kind, lambda _: {}), COMPRESSIONS.get(kind, zipfile.ZIP_DEFLATED))
    if kind == "encrypted":
        content = bytearray(path.read_bytes())
        for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
            at = content.find(signature)
            while at >= 0:
                content[at + offset] |= 1
                at = content.find(signature, at + 1)
        path.write_bytes(content)
    elif kind == "twice":
        name = first_array(members_of(path))
        with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(name, archive.read(name))
    assert "file.npz: " in read(path)


@pytest.mark.parametrize("read", READERS)
def test_reading_damaged_files_closes_them(read, tmp_path):
    """Every byte of the archive's own records and some of the data, one bit each."""
    path = tmp_path / "file.npz"
    write_valid(read, path)
    whole = path.read_bytes()
    central = whole.index(b"PK\1\2")
    places = [*range(0, central, 7), *range(central, len(whole))]
    flips = [(place, 1 << (place % 8)) for place in places if whole[place] != 0 or place % 3 == 0]
    refused = 0
    for place, bit in flips:
        content = bytearray(whole)
        content[place] ^= bit
        path.write_bytes(content)
        before = os.listdir("/dev/fd")
        try:
            kept = found_in(read, path)
        except (WeightsError, AssertionError) as error:
            kept = error  # a file left open would live as long as the error's frames
            refused += 1
        else:
            assert kept == found_in(read, write_again(read, tmp_path))
        assert len(os.listdir("/dev/fd")) == len(before), f"bit {bit} of byte {place} leaves the file open"
        del kept
    assert refused > len(flips) / 2


def write_again(read, folder):
    path = folder / "right.npz"
    if not path.exists():
        write_valid(read, path)
    return path


def found_in(read, path):
    """Return all that a reader finds, comparable; raise where it refuses."""
    if read is read_weights:
        config, arrays = load_weights(path, "target", TargetConfig)
        return config, {name: array.tobytes() for name, array in arrays.items()}
    if read is read_traces:
        traces = Traces.load(path)
        return [traces.prompt_names, traces.about, traces.candidates.logits.tobytes(), traces.continuations.tobytes()]
    if read is read_container:
        return [None if array is None else array.tobytes() for array in vars(DraftTree.load(path)).values()]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        assert main(["tree", str(path), "--json"]) == 0
    return printed.getvalue()


@pytest.mark.parametrize("load", [lambda path: load_weights(path, "target", TargetConfig), TinyTarget.load])
@rejects(
    *(
        (WeightsError, rf"file\.npz: TargetConfig: {message}", field, value)
        for field, value, message in (
            ("num_layers", 10**9, r"`num_layers` is 1000000000, expected an integer in 1\.\.1024"),
            ("num_layers", "1", "`num_layers` is '1', expected an integer"),
            ("num_layers", True, "`num_layers` is True, expected an integer"),
            ("d_model", 0, "`d_model` is 0, expected an integer in"),
            ("d_hidden", 512.0, r"`d_hidden` is 512\.0, expected an integer"),
            ("rope_base", "10000", "`rope_base` is '10000', expected a real number"),
            ("rope_base", 10**400, "`rope_base` is 1000.*, expected a finite number > 0"),
            ("norm_eps", float("nan"), "`norm_eps` is nan, expected a finite number > 0"),
            ("feature_layers", [0, "1"], "`feature_layers` is '1', expected an integer"),
            ("feature_layers", "012", "`feature_layers` is '012', expected a list of layers"),
            ("feature_layers", [], r"`feature_layers` is \[\], expected a list of layers"),
        )
    )
)
def test_load_weights_rejects_sizes_that_are_none(field, value, load, tmp_path, monkeypatch):
    path = tmp_path / "file.npz"
    monkeypatch.setattr(TargetConfig, "to_dict", lambda self: {**vars(CONFIG), field: value})
    save_weights(path, "target", CONFIG, small_weights())  # with a right checksum
    load(path)


def test_load_weights_rejects_other_types_under_a_right_checksum(tmp_path, monkeypatch):
    path = tmp_path / "file.npz"
    monkeypatch.setattr(np, "ascontiguousarray", lambda array, dtype=None: array)
    save_weights(path, "target", CONFIG, {"norm.weight": np.ones(16, "U1")})
    with pytest.raises(WeightsError, match=r"`norm\.weight` is <U1, expected float16"):
        load_weights(path, "target", TargetConfig)


DEEP = "[" * 100_000


ODD_JSON = [DEEP, '{"format": ' + DEEP, "[1", "\udcff", "1" * 5000, "null", '"x"', '{"format": 3}']


@pytest.mark.parametrize("text", ODD_JSON, ids=lambda text: text[:15].encode("unicode_escape").decode())
def test_reading_rejects_odd_json_in_one_sentence(tmp_path, text):
    raw = text.encode(errors="surrogateescape")
    for read in CHECKED:
        header = {"__header__.npy": npy_of(np.frombuffer(raw, np.uint8))}
        assert "file.npz: " in read(spoiled(read, tmp_path, lambda _, header=header: header))
    path = tmp_path / "file.json"
    path.write_bytes(raw)
    with pytest.raises(WeightsError, match=r"file\.json: "):
        CostTable.load(path)
    code, said = said_by(explore, "costs", path, "--variant", "v9", "--dtype", "float16")
    assert code == 1
    assert said.startswith("explore: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", "40"),
        ("vocab_size", 40.0),
        ("max_budget", None),
        ("prompt_names", "ab"),
        ("prompt_names", [1, 2]),
        ("prompt_names", {"a": 1, "b": 2}),
        ("about", ["a"]),
        ("about", {"a": 1}),
    ],
)
def test_load_traces_rejects_headers_of_other_types_under_a_right_checksum(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(_files, "checksum", lambda about, arrays: "right")
    path = spoiled(read_traces, tmp_path, lambda members: header_with(members, **{name: value}))
    assert f"`{name}` is " in read_traces(path)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (None, "lacks one of"),
        ({}, "lacks one of depths, first_child, .* or holds more"),
        ({"path_scores": None, "class": 1}, "or holds more"),
        ({"path_scores": "x"}, "neither an array nor an integer"),
        ({"path_scores": True}, "neither an array nor an integer"),
        ({"path_scores": 3}, "`path_scores` is int, expected an array"),
    ],
)
def test_load_containers_rejects_other_fields_under_a_right_checksum(tmp_path, monkeypatch, others, said):
    monkeypatch.setattr(_files, "checksum", lambda about, arrays: "right")
    path = spoiled(read_container, tmp_path, lambda old: header_with(old, others=others, sha256="right"))
    assert re.search(f"file.npz: .*{said}", read_container(path))


@rejects(
    (WeightsError, "expected sizes below 2", [[8, 2**31, 1, 1.0]], {}),
    (WeightsError, "expected a finite number > 0", [[8, 1, 1, 10**400]], {}),
    (WeightsError, "`about` has a gpu that is not a string", [[8, 1, 1, 1.0]], {"gpu": ["x"]}),
)
def test_load_cost_table_rejects_other_types(rows, about, tmp_path):
    path = tmp_path / "costs.json"
    CostTable.load().save(path)
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "rows": rows, "about": {**whole["about"], **about}}))
    CostTable.load(path)


def test_bundled_weights_are_read_as_they_were():
    with np.load(DRAFTER_WEIGHTS) as file:
        wanted = {name: file[name] for name in file.files if name != "__header__"}
    config, weights = load_weights(DRAFTER_WEIGHTS, "drafter", DrafterConfig)
    assert config == DrafterConfig()
    assert weights.keys() == wanted.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(value, wanted[name], strict=True)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_tree_reads_every_dtype_that_it_can_build_from(tmp_path, dtype, suffix, order):
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    path, logits = tmp_path / f"logits.{suffix}", np.asarray(LOGITS.astype(dtype), order=order)
    np.save(path, logits) if suffix == "npy" else np.savez(path, draft_logits=logits)
    np.save(tmp_path / "wide.npy", logits.astype(np.float64 if dtype == "float64" else np.float32))
    assert found_in(read_logits, path) == found_in(read_logits, tmp_path / "wide.npy")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e3m4", "int4"])
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_tree_says_how_to_save_what_a_header_does_not_name(tmp_path, dtype, suffix):
    import ml_dtypes

    path, logits = tmp_path / f"logits.{suffix}", LOGITS.astype(getattr(ml_dtypes, dtype))
    np.save(path, logits) if suffix == "npy" else np.savez(path, draft_logits=logits)
    assert "save it as float32, np.save(file, array.astype(np.float32))" in read_logits(path)
    np.save(tmp_path / "advised.npy", logits.astype(np.float32))
    assert "parents" in found_in(read_logits, tmp_path / "advised.npy")

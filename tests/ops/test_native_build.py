"""The build of the C kernels: cached, shared by processes, and survived where something is missing or broken."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaserve.ops.native import library

pytestmark = pytest.mark.skipif(library.load().library is None, reason=f"no C kernels: {library.load().note}")

TINY = "int deltaserve_answer(void) { return 42; }\n"
LOAD = "from deltaserve.ops.native import library; print(library.load().note)"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One small source, its own cache directory, and nothing loaded yet."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.c").write_text(TINY)
    monkeypatch.setattr(library, "SOURCES", folder)
    monkeypatch.setattr(library, "SIGNATURES", {"answer": ()})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library._load.cache_clear()
    yield folder
    library._load.cache_clear()


def answer(native: library.Native) -> int:
    assert native.library is not None, native.note
    return int(native.library.deltaserve_answer())


def built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "deltaserve").glob("*.so"))


def load_anew() -> library.Native:
    library._load.cache_clear()
    return library.load()


def test_a_second_start_builds_nothing(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(load_anew()) == 42
    assert len(built(tmp_path)) == 1
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("built again"))
    assert answer(load_anew()) == 42


def test_other_sources_are_built_anew(sources: Path, tmp_path: Path) -> None:
    load_anew()
    (sources / "answer.c").write_text(TINY.replace("42", "43"))
    assert answer(load_anew()) == 43
    assert len(built(tmp_path)) == 2


@pytest.mark.parametrize("damage", [b"", b"\x7fELF nonsense"])
def test_a_damaged_copy_is_replaced(sources: Path, tmp_path: Path, damage: bytes) -> None:
    load_anew()
    (path,) = built(tmp_path)
    path.unlink()  # it may still be mapped
    path.write_bytes(damage)
    assert answer(load_anew()) == 42
    assert path.read_bytes() != damage


def test_a_directory_that_cannot_be_written_is_survived(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert answer(load_anew()) == 42


def test_without_a_compiler_a_note_says_what_to_install(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    native = load_anew()
    assert native.library is None
    assert native.note is not None and "Install gcc or clang" in native.note


def test_a_compiler_that_fails_is_quoted(sources: Path) -> None:
    (sources / "answer.c").write_text("#error no such luck\n")
    native = load_anew()
    assert native.library is None
    assert native.note is not None and "could not build" in native.note


def test_the_next_compiler_is_tried(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "cc").write_text("#!/bin/sh\nexit 1\n")
    (broken / "cc").chmod(0o755)
    good = next(library._compilers())
    (broken / "gcc").write_text(f'#!/bin/sh\nexec {good} "$@"\n')
    (broken / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken}:/usr/bin:/bin")
    assert answer(load_anew()) == 42


def test_an_unknown_processor_flag_is_left_out(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "TARGETS", ("-march=no-such-processor",))
    assert answer(load_anew()) == 42


def test_processes_may_build_at_the_same_time(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", LOAD]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in running] == ["None", "None"]
    (path,) = (tmp_path / "deltaserve").glob("*.so")
    ctypes.CDLL(str(path))
    assert not [left for left in path.parent.iterdir() if left.is_dir()], "scratch directories are removed"

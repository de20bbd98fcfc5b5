"""Compiles the C kernels of this folder once per machine, and loads them.

The user's own compiler makes code for the user's own processor, in about two seconds; the result is kept in the cache
directory ($XDG_CACHE_HOME/deltaserve, ~/.cache by default) under a name that hashes all it depends on: sources, flags,
compiler and processor. A file is put there in one step, so that processes may build at the same time, and is used only
if its checksum is right. Where the directory cannot be written, the library is built anew at each start; where there is
no compiler, `load` says so and the references run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-semantic-interposition",
    "-fPIC",
    "-pthread",
)
TARGETS = ("-march=native", "-mcpu=native")  # the first that the compiler takes, else none
SOURCES = Path(__file__).parent
TIMEOUT_S = 120
_CPUINFO_KEYS = ("model name", "flags", "Features", "CPU part")
_lock = threading.Lock()

_P, _N, _F, _D = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_double
# Arguments of the exported functions, as their definitions give them. All return 0, or 1 without memory.
SIGNATURES = {
    "linear": (_P, _N, _P, _P, _N),
    "look_up": (_P, _N, _N, _N, _P, _N, _P, _N),
    "norm": (_P, _P, _P, _F, _N, _N, _P, _P, _N),
    "cos_sin": (_P, _P, _D, _N, _N, _P, _P),
    "gdn_extend": (_P,) * 9 + (_N,),
    "gdn_prefill": (_P,) * 9 + (_N,),
    "gdn_fold": (_P, _P, _N, _N, _P, _P, _P, _N),
    "gdn_mixer": (_P, _P, _N) + (_P,) * 7 + (_N,),
    "attention": (_P, _P, _P, _P, _P, _P, _N),
    "attention_mixer": (_P, _P, _N) + (_P,) * 8 + (_N, _P, _P, _N),
    "ffn": (_P, _N, _N, _P, _P, _P, _F, _P, _P, _N),
}


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded library, or None; `note` is a sentence for the user where something is missing."""

    library: ctypes.CDLL | None
    note: str | None = None


def load() -> Native:
    """The library of this process: loaded, or else built and loaded, at the first call."""
    with _lock:
        return _load()


def begin() -> None:
    """Start `load` in a thread, for a caller that has other things to do meanwhile."""
    threading.Thread(target=load, name="native-build", daemon=True).start()


@functools.cache
def _load() -> Native:
    problem = "there is no C compiler (cc, gcc or clang)"
    for compiler in _compilers():
        try:
            library = _declared(_open(compiler))
        except (OSError, subprocess.SubprocessError) as error:
            problem = f"{compiler} could not build the CPU kernels ({_last_line(error)})"
            continue
        return Native(library)
    return Native(None, f"{problem}; the slower reference code runs instead. Install gcc or clang for more speed")


def _compilers() -> Iterator[str]:
    found = (shutil.which(name) for name in COMPILERS)
    return iter(dict.fromkeys(os.path.realpath(path) for path in found if path))


def _open(compiler: str) -> ctypes.CDLL:
    """From the cache if it has a sound copy, else built into it, else built for this process alone."""
    name = f"kernels-{_key(compiler)}.so"
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltaserve"
        directory.mkdir(parents=True, exist_ok=True)
        if not _is_sound(directory / name):
            _build_into(compiler, directory, name)
        return ctypes.CDLL(str(directory / name))
    except (OSError, RuntimeError):  # RuntimeError: this user has no home directory
        with tempfile.TemporaryDirectory() as scratch:
            _build_into(compiler, Path(scratch), name)
            return ctypes.CDLL(str(Path(scratch) / name))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in SIGNATURES.items():
        getattr(library, f"deltaserve_{name}").argtypes = arguments
    return library


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=TIMEOUT_S)  # noqa: S603
    for part in (compiler.encode(), version.stdout, repr((FLAGS, TARGETS)).encode(), _processor().encode()):
        digest.update(hashlib.sha256(part).digest())
    for source in _sources():
        digest.update(hashlib.sha256(source.name.encode() + source.read_bytes()).digest())
    return digest.hexdigest()[:24]


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))


def _processor() -> str:
    """What -march=native depends on."""
    words = [platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return " ".join(words)
    return " ".join(words + sorted({line for line in lines if line.split("\t")[0].strip() in _CPUINFO_KEYS}))


def _is_sound(path: Path) -> bool:
    try:
        return _checksum_file(path).read_text("utf-8") == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _build_into(compiler: str, directory: Path, name: str) -> None:
    """Library first, checksum second, each under its final name at once."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        built, checksum = Path(scratch) / name, Path(scratch) / "checksum"
        _compile(compiler, built)
        checksum.write_text(hashlib.sha256(built.read_bytes()).hexdigest(), "utf-8")
        built.replace(directory / name)
        checksum.replace(_checksum_file(directory / name))


def _compile(compiler: str, output: Path) -> None:
    sources = [path for path in _sources() if path.suffix == ".c"]
    for target in TARGETS:
        try:
            _compile_for((target,), compiler, sources, output)
        except subprocess.SubprocessError:
            continue
        return
    _compile_for((), compiler, sources, output)


def _compile_for(target: tuple[str, ...], compiler: str, sources: list[Path], output: Path) -> None:
    """Two compilers at a time, then the linker. Raises CalledProcessError with the compiler's words in stderr."""
    objects = [output.with_suffix(f".{source.stem}.o") for source in sources]
    commands = [[compiler, *FLAGS, *target, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)]
    halves = (commands[::2], commands[1::2])
    failures: list[subprocess.SubprocessError] = []

    def run_all(half: list[list[str]]) -> None:
        try:
            for command in half:
                _run(command)
        except subprocess.SubprocessError as error:
            failures.append(error)

    threads = [threading.Thread(target=run_all, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    _run([compiler, "-shared", *map(str, objects), "-lm", "-o", str(output)])


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_S)  # noqa: S603


def _last_line(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = said.decode("utf-8", "replace").strip().splitlines() if said else [str(error)]
    return lines[-1] if lines else str(error)

"""What users install: the source distribution, the wheels that come out of it, and what a new user then does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = re.findall(r'__version__ = "(.+?)"', (ROOT / "aioshm/__init__.py").read_text())[0]
MINE = """
from aioshm.blocking import MessageQueue
with MessageQueue(0, 0, name="mine"):
    print(flush=True)
    __import__("sys").stdin.read()
"""
HAS_COMPILER = shutil.which("cc") is not None
needs_a_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no compiler")


def _run(*command: str | Path, **environ: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("AIOSHM_NATIVE", "PYTHONPATH")}
    done = subprocess.run(
        command, env={**environment, **environ}, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _pip(*arguments: str | Path, python: str | Path = sys.executable, **environ: str) -> str:
    return _run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments, **environ)


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of what git has, made in a copy, so that nothing of an earlier build is in it."""
    tree = tmp_path_factory.mktemp("tree")
    files = _run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in files:
        if (ROOT / name).is_file():  # one that was removed is still listed
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return _built("sdist", tree)


def _built(kind: str, tree: Path, **environ: str) -> Path:
    """Build a distribution as pip does."""
    code = f"import os, sys; os.chdir(sys.argv[1]); from setuptools.build_meta import *; build_{kind}('dist')"
    _run(sys.executable, "-W", "ignore", "-c", code, tree, **environ)
    [found] = (tree / "dist").iterdir()
    return found


def _wheel(sdist: Path, folder: Path, **environ: str) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return _built("wheel", folder / f"aioshm-{VERSION}", **environ)


def _native_files(wheel: Path) -> set[str]:
    return {name.partition(".")[0] for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}


@pytest.mark.slow
def test_the_source_distribution_is_complete(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(_run("git", "-C", ROOT, "ls-files").splitlines()) - {".gitignore"}
    assert {name for name in tracked if (ROOT / name).is_file()} - names == set()
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs_a_compiler
def test_from_the_sources_to_a_new_user(sdist: Path, tmp_path: Path) -> None:
    """In one test, so that tests side by side do not build the same things."""
    pure = _wheel(sdist, tmp_path / "without a compiler", CC="/nowhere/cc")
    native = _wheel(sdist, tmp_path / "with a compiler")
    _a_wheel_is_named_by_what_is_in_it(pure, native)
    _a_wheel_without_the_native_core_says_how_to_get_it(pure, tmp_path)
    _a_new_user(native, tmp_path)
    assert _wheel(sdist, tmp_path / "not wanted", AIOSHM_NATIVE="0").name == pure.name
    with pytest.raises(AssertionError, match="/nowhere/cc"):
        _wheel(sdist, tmp_path / "demanded", AIOSHM_NATIVE="1", CC="/nowhere/cc")


def _a_wheel_is_named_by_what_is_in_it(pure: Path, native: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-" in native.name
    assert _native_files(native) == {"aioshm/ring/_native", "aioshm/events/protocol/_encoder"}
    assert pure.name == f"aioshm-{VERSION}-py3-none-any.whl"
    assert _native_files(pure) == set()
    metadata = zipfile.ZipFile(pure).read(f"aioshm-{VERSION}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: true" in metadata
    assert {"aioshm/__init__.py", "aioshm/py.typed", "aioshm/ring/_native.pyi"} <= set(zipfile.ZipFile(pure).namelist())


def _a_wheel_without_the_native_core_says_how_to_get_it(pure: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(pure).extractall(tmp_path / "pure")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from aioshm.__main__ import main; sys.exit(main())"
    told = json.loads(_run(sys.executable, "-I", "-c", code, tmp_path / "pure", "doctor", "--json"))
    [finding] = [each for each in told["findings"] if each["name"] == "native core"]
    assert finding["found"] == "not built"
    cure = "pip cache remove aioshm; AIOSHM_NATIVE=1 pip install --force-reinstall --no-deps aioshm"
    assert finding["advice"].endswith(f"install a C compiler, then: {cure}")


def _a_new_user(wheel: Path, tmp_path: Path) -> None:
    """A new environment, the wheel with its command, the README's quickstart, and the commands that look around."""
    environment = tmp_path / "env"
    _run(sys.executable, "-m", "venv", "--without-pip", environment)  # the one that is here does, and is quicker
    python, command = environment / "bin/python", environment / "bin/aioshm"
    _pip("--python", python, "install", "--no-compile", "-c", ROOT / "constraints.txt", f"{wheel}[cli]")
    blocks = re.findall(r'```python title="quickstart.py"\n(.*?)```', (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "quickstart.py").write_text(blocks[0])
    expected = [f"received {{'number': {number}}}" for number in range(3)]
    assert _run(python, "-I", tmp_path / "quickstart.py").splitlines() == expected
    findings = {each["name"]: each for each in json.loads(_run(command, "doctor", "--json"))["findings"]}
    assert findings["native core"]["verdict"] == "good"
    assert findings["uvloop"]["verdict"] == "note"  # of an extra, which is not there
    assert "pip install 'aioshm[uvloop]'" in findings["uvloop"]["advice"]
    assert _run(command, "--version") == f"aioshm {VERSION}\n"
    completion = _run(command, "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_aioshm_completion" in completion
    with subprocess.Popen([python, "-I", "-c", MINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        writer.stdout.readline()
        assert "mine" in _run(command, "ls", "--json")
        assert "mine" in _run(command, "top", "--once", "--json")
        writer.communicate()


def test_importing_takes_at_most_a_tenth_of_a_second() -> None:
    code = "import time; a = time.process_time(); import aioshm; print(time.process_time() - a)"
    best = min(float(_run(sys.executable, "-I", "-c", code)) for _ in range(3))
    assert best <= 0.1


def test_the_c_code_has_no_mutable_state_of_its_own() -> None:
    """Whatever is static is constant, or a table for the interpreter: two interpreters, or threads, share nothing."""
    tables = r"PyMethodDef|PyGetSetDef|PyMemberDef|PyType_Slot|PyType_Spec|PyModuleDef_Slot|struct PyModuleDef"
    for path in (ROOT / "aioshm").rglob("*.c"):
        for line in re.findall(r"^[ \t]*static (?!inline)([^(\n]*?(?:=|;|\[).*)$", path.read_text(), re.MULTILINE):
            assert re.match(rf"const |{tables}|char \*names\[\]", line), f"{path.name}: {line}"

"""What importing aioshm costs: names are imported when they are first asked for."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import aioshm
import aioshm.engine
import aioshm.observe
import aioshm.process
import aioshm.testing


def loaded_by(program: str) -> set[str]:
    """Return the modules that are there after a program has run in an interpreter of its own."""
    code = f"{program}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_alone_loads_next_to_nothing() -> None:
    loaded = loaded_by("import aioshm; aioshm.__version__, dir(aioshm)")
    assert not {"psutil", "zmq", "asyncio", "asyncio.subprocess", "msgspec", "tempfile", "ssl"} & loaded
    assert {name for name in loaded if name.startswith("aioshm.")} == {"aioshm.deferred"}


def test_a_queue_of_one_machine_loads_no_network_and_no_process_table() -> None:
    loaded = loaded_by(
        "import asyncio\n"
        "from aioshm import MessageQueue, Options\n"
        "async def main():\n"
        "    mq = MessageQueue(1, 1, options=Options(runtime_dir='/nowhere'))\n"
        "    await mq.aclose()\n"
        "asyncio.run(main())\n"
    )
    assert "aioshm.queue.api" in loaded
    assert not {"psutil", "zmq", "tempfile", "numpy", "torch"} & loaded


def test_an_engine_s_process_imports_no_client_and_no_supervisor() -> None:
    loaded = loaded_by("from aioshm.engine import die_with_parent, run_engine_core")
    assert "aioshm.engine.core.core" in loaded
    assert "psutil" not in loaded
    assert not {name for name in loaded if name.startswith(("aioshm.engine.client.", "aioshm.queue", "aioshm.ring"))}
    assert not {name for name in loaded if name.startswith(("aioshm.engine.startup.", "aioshm.engine.workers."))}


@pytest.mark.parametrize("package", [aioshm, aioshm.engine, aioshm.observe, aioshm.process, aioshm.testing])
def test_each_name_is_what_type_checkers_are_told(package: ModuleType) -> None:
    assert package.__file__ is not None
    homes: dict[str, str] = {}
    for statement in ast.parse(Path(package.__file__).with_suffix(".pyi").read_text()).body:
        if isinstance(statement, ast.ImportFrom):
            assert statement.module is not None
            assert [alias.name for alias in statement.names] == [alias.asname for alias in statement.names]
            homes |= {alias.name: statement.module for alias in statement.names}
    assert sorted(homes) == package.__all__
    assert set(package.__all__) <= set(dir(package))
    for name, home in homes.items():
        assert getattr(package, name) is getattr(importlib.import_module(home), name)


def test_no_such_name() -> None:
    with pytest.raises(AttributeError, match="module 'aioshm' has no attribute 'Nothing'"):
        aioshm.Nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="Nothing"):
        from aioshm import Nothing  # type: ignore[attr-defined]  # noqa: F401


def test_a_package_in_a_zip_archive_has_its_names(tmp_path: Path) -> None:
    code = "from aioshm.deferred import import_when_used\n"
    code += "__getattr__, __dir__, __all__ = import_when_used(__name__, __file__)\n"
    path = str(tmp_path / "packages.zip")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("zipped/__init__.py", code)
        archive.writestr("zipped/__init__.pyi", "from math import pi as pi\n")
    program = f"import sys; sys.path.insert(0, {path!r}); import zipped; print(zipped.__all__, zipped.pi)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("['pi'] 3.14")

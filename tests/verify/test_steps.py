"""The functions that the models in verify/ stand for are those that were modelled."""

from __future__ import annotations

import re
import tomllib

import pytest

from verify import steps
from verify.__main__ import MODELS, TABLE


def test_no_function_has_changed_without_its_model_being_looked_at() -> None:
    assert not steps.changed(), (
        "\n".join(steps.changed())
        + "\nLook whether verify/models/ still says what the code does, run make verify, then python -m verify --accept"
    )


def test_a_change_of_either_language_is_noticed(tmp_path, monkeypatch) -> None:
    ring = tmp_path / "aioshm" / "ring"
    (ring / "core").mkdir(parents=True)
    for name in ("core/send.c", "ends.py"):
        (ring / name).write_text((steps.ROOT / "aioshm" / "ring" / name).read_text())
    places = ["ring/core/send.c::readers_parked", "ring/ends.py::WriterControl.want"]
    before = [steps.digest(place) for place in places]
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    assert [steps.digest(place) for place in places] == before
    for name, fence in (
        ("core/send.c", "    full_fence();\n"),
        ("ends.py", "        memory_fence()  # before the parked flag"),
    ):
        text = (ring / name).read_text()
        assert fence in text
        (ring / name).write_text(text.replace(fence, "        pass  #" if name.endswith("py") else ""))
    assert all(now != then for now, then in zip([steps.digest(place) for place in places], before, strict=True))
    with pytest.raises(LookupError, match="no_such"):
        steps.digest("ring/core/send.c::no_such")


def test_every_mutation_is_one_of_its_model() -> None:
    for model, table in tomllib.loads(TABLE.read_text()).items():
        text = (MODELS / f"{model}.pml").read_text()
        known = set(
            re.findall(r"#(?:ifdef|ifndef)\s+(\w+)|defined\((\w+)\)|/\* [-+](\w+)(?:: .*)? \*/$", text, re.MULTILINE)
        )
        names = {name for pair in known for name in pair if name}
        for kind in ("mutations", "spare"):
            for mutation in table.get(kind, ()):
                assert mutation["define"] in names, (model, mutation["define"])
                assert mutation["where"]
        assert model in steps.functions(), f"verify/steps.toml does not say what {model} stands for"

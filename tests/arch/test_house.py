"""The house rules that can be checked: sizes, names, sentences under fields, the light half, frozen options."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from pydantic import BaseModel

import fathom
from fathom.config.load import option_names
from fathom.config.run import RunConfig

SOURCE = Path(fathom.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
LIGHT = ["core", "config", "ledger", "text", "buffer", "envs", "evidence", "apps"]


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 600, "two rooms in one file?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 100, f"{node.name} is too long"


def test_folders_stay_small() -> None:
    crowded = {
        folder: modules
        for folder in {path.parent for path in FILES}
        if len(modules := [p.name for p in folder.glob("*.py") if p.name != "__init__.py"]) > 12
    }
    assert not crowded


def test_no_drawers() -> None:
    assert not [path for path in FILES if path.stem in {"utils", "util", "common", "helpers", "misc"}]


def test_only_the_environment_registry_imports_by_name() -> None:
    importing = [name_of(path) for path in FILES if "import_module" in path.read_text()]
    assert importing in ([], ["fathom.envs.registry"])


def test_the_page_stays_a_page() -> None:
    page = SOURCE / "run" / "pipeline.py"
    lines = page.read_text().splitlines()
    assert len(lines) <= 300


@pytest.mark.parametrize("package", LIGHT)
def test_the_light_half_loads_no_torch(package: str) -> None:
    modules = [name_of(path) for path in FILES if path.relative_to(SOURCE).parts[0] == package]
    code = "import sys\n" + "".join(f"import {name}\n" for name in modules)
    code += "bad = sorted({'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules)); sys.exit(', '.join(bad) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def sections(root: type[BaseModel] = RunConfig) -> set[type[BaseModel]]:
    found = {root}
    for field in root.model_fields.values():
        for candidate in [field.annotation, *getattr(field.annotation, "__args__", ())]:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                found |= sections(candidate)
    return found


def test_every_option_has_a_sentence() -> None:
    for section in sections():
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def records() -> list[type[msgspec.Struct]]:
    found: list[type[msgspec.Struct]] = []
    for path in FILES:
        if path.relative_to(SOURCE).parts[0] in {"core", "ledger"}:
            module = sys.modules.get(name_of(path)) or __import__(name_of(path), fromlist=["x"])
            found += [
                value
                for value in vars(module).values()
                if inspect.isclass(value) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
            ]
    return found


def test_records_are_frozen_tagged_and_versioned() -> None:
    assert records()
    for record in records():
        if record.__subclasses__():
            continue  # only what its leaves have in common is written, as part of them
        config = record.__struct_config__
        assert config.frozen, record
        assert isinstance(config.tag, str), record
        assert config.tag.rpartition(".")[2].isdigit(), record


def test_every_field_of_a_record_has_a_sentence() -> None:
    for path in FILES:
        if path.relative_to(SOURCE).parts[0] not in {"core", "ledger"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef) or "frozen" not in [word.arg for word in node.keywords]:
                continue  # a record says so where it is declared, a dataclass in its decorator
            for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(statement, ast.AnnAssign):
                    assert isinstance(following, ast.Expr), f"{path.name}: {node.name}.{ast.unparse(statement.target)}"


def test_the_options_are_these() -> None:
    """Adding an option edits this list in the same change; the ceiling is 240."""
    listed = (Path(__file__).parent / "options.txt").read_text().split()
    assert option_names() == listed
    assert len(listed) <= 240

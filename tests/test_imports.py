"""Holds the layers of the project: who may import whom (ARCHITECTURE.md shows the same table), read with ast.

Also which parts may import torch and transformers. What a command or a function imports when it runs counts too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Part -> what it may import beside itself, `errors` and `ids`. A row for a deeper part overrides the row around it.
ALLOWED: dict[str, set[str]] = {
    "cli": {"*"},
    "bench": {"generate", "runtime", "residency", "routing", "native", "plan", "store", "quant", "trace"},
    "server": {"generate", "trace"},
    "adapter": {"store.reader", "quant"},
    "train": {"generate", "runtime", "routing", "adapter", "store", "trace", "native", "quant"},
    "evaluate": {"generate", "runtime", "adapter", "plan", "routing", "store", "trace"},
    "generate": {"runtime", "plan", "trace"},
    "generate.scheduler": set(),
    "runtime": {"residency", "routing", "adapter", "store.reader", "native", "quant", "trace"},
    "residency": {"store.reader", "native.io", "trace"},
    "residency.policies": set(),
    "plan": {"trace", "residency.policies"},
    "routing": {"trace", "native.roster"},
    "store": {"checkpoint", "quant"},
    "checkpoint": {"quant"},
    "native": {"quant"},
    "trace": set(),
    "quant": set(),
    "errors": set(),
    "ids": set(),
}
EVERYWHERE = {"errors", "ids"}

# Parts that never import these libraries.
FORBIDDEN_LIBRARIES: dict[str, set[str]] = {
    "plan": {"torch", "transformers"},
    "trace": {"torch", "transformers"},
    "residency.policies": {"torch", "transformers"},
    "generate.scheduler": {"torch", "transformers"},
    "quant.formats": {"torch", "transformers", "numpy"},
    "ids": {"torch", "transformers", "numpy"},
    "errors": {"torch", "transformers", "numpy"},
}
TRANSFORMERS_ONLY_IN = ("runtime", "train", "evaluate")


def modules() -> dict[str, Path]:
    """`runtime.model` -> its file, for every module of stoker but its front (`stoker` and `stoker.__main__`)."""
    files = (file.relative_to(ROOT / "stoker") for file in (ROOT / "stoker").rglob("*.py"))
    names = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): ROOT / "stoker" / file for file in files}
    return {name: file for name, file in names.items() if name not in ("__init__", "__main__")}


def imports(module: str, tree: ast.AST, is_package: bool) -> Iterator[str]:
    """Full names of everything that `module` imports: `from stoker.store import reader` gives stoker.store.reader."""
    package = f"stoker.{module}".split(".")
    if not is_package:
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def imported(module: str) -> set[str]:
    file = modules()[module]
    return set(imports(module, ast.parse(file.read_text(encoding="utf-8")), file.name == "__init__.py"))


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def row(module: str) -> str:
    """The most particular row of the table that speaks of a module."""
    rows = [part for part in ALLOWED if within(module, part)]
    assert rows, f"stoker/{module.replace('.', '/')}: no row in the table; add one to DESIGN's order or move the file"
    return max(rows, key=len)


def violation(module: str, target: str) -> bool:
    """Whether `target` (below stoker) is out of `module`'s reach."""
    part = row(module)
    allowed = ALLOWED[part] | EVERYWHERE | {part}
    if "*" in allowed or target == "__version__":
        return False
    return not any(within(target, name) for name in allowed)


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_keep_to_the_table(module: str) -> None:
    targets = {name.removeprefix("stoker.") for name in imported(module) if name.startswith("stoker.")}
    wrong = sorted(target for target in targets if violation(module, target))
    assert not wrong, f"stoker.{module} may import {sorted(ALLOWED[row(module)])}, and imports {wrong}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_heavy_libraries_stay_where_they_belong(module: str) -> None:
    libraries = {name.split(".")[0] for name in imported(module)}
    if not any(within(module, part) for part in TRANSFORMERS_ONLY_IN):
        assert "transformers" not in libraries
    for part, forbidden in FORBIDDEN_LIBRARIES.items():
        if within(module, part):
            assert not libraries & forbidden


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("routing.gate", "residency.hot"),
        ("residency.policies.lru", "residency.slots"),
        ("residency.hot", "store.writer"),
        ("runtime.model", "generate.engine"),
        ("native.kernels", "store.reader"),
        ("plan.replay", "residency.slots"),
        ("generate.scheduler", "runtime.model"),
        ("store.pack", "runtime.model"),
    ],
)
def test_the_table_forbids(module: str, target: str) -> None:
    assert violation(module, target)


def test_every_way_of_importing_is_seen() -> None:
    code = "import stoker.store.pack\nfrom stoker.store import reader\n"
    code += "from . import slots\nfrom ..store.reader import Store\n"
    nested = "def f():\n    from stoker.generate import model\n    if TYPE_CHECKING:\n        import transformers\n"
    found = set(imports("residency.hot", ast.parse(code + nested), is_package=False))
    assert found == {
        "stoker.store.pack",
        "stoker.store.reader",
        "stoker.residency.slots",
        "stoker.store.reader.Store",
        "stoker.generate.model",
        "transformers",
    }

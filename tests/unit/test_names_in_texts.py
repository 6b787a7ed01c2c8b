"""Docstrings and pages name only identifiers that exist, so that a renaming cannot leave a text behind."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("[!g_]*/*.md"), *(ROOT / "tests").rglob("*.md")]
)
"""Pages that are written by hand. Generated ones are in docs/generated."""
NAMES_OF_OTHERS = {
    *(
        "FlatParamHandle",
        "_get_aligned_numel",
        "grad_norm",
        "Stateful",
        "parallelize_plan",
        "to_empty",
        "PostLocalSGDOptimizer",
    ),  # torch
    *("MoEAuxLossAutoScaler", "seq_aux_loss"),  # Megatron-LM
    *("average_tokens_across_devices", "max_length", "per_device_train_batch_size"),  # transformers
    *(
        "__code__",
        "__lshift__",
        "__rshift__",
        "num_",
        "vX",
        "FullyShardedDataParallelPlugin",
        "SLURM_ARRAY_TASK_ID",
        "RandomState",
    ),
}
"""Identifiers that texts mention and no code here uses."""
HISTORY = {"CHANGELOG.md"}


def test_every_identifier_in_a_text_exists() -> None:
    """Words in single backticks occur in code. On pages only words that look like identifiers count."""
    sources = {
        file: file.read_text() for folder in ("equivcheck", "tests", "tools", "docs") for file in (ROOT / folder).rglob("*.py")
    }
    known = {*dir(builtins), *NAMES_OF_OTHERS}
    mentioned: dict[str, Path] = {}
    for file, source in sources.items():
        texts = list(_docstrings(ast.parse(source)))
        known.update(file.with_suffix("").parts, re.findall(r"\w+", _without(texts, source)))
        if file.is_relative_to(ROOT / "equivcheck") and "scripts" not in file.parts:
            mentioned |= {word: file for text in texts for word in _words(text.value) if word not in mentioned}
    for page in PAGES:
        if page.name not in HISTORY:
            text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
            mentioned |= {word: page for word in _words(text) if re.search(r"_|[a-z][A-Z]", word) and word not in mentioned}
    assert {word: str(file.relative_to(ROOT)) for word, file in mentioned.items() if word not in known} == {}


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _without(texts: list[ast.Constant], source: str) -> str:
    lines = source.splitlines()
    for text in texts:
        lines[text.lineno - 1 : text.end_lineno] = [""] * ((text.end_lineno or text.lineno) - text.lineno + 1)
    return "\n".join(lines)


def _words(text: object) -> Iterator[str]:
    for quoted in re.findall(r"(?<!`)`([^`]+)`(?!`)", str(text)):
        yield from re.findall(r"[A-Za-z_]\w*", quoted)

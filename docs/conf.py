"""Sphinx configuration: `tox run -e docs`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))  # a checkout, installed or not

from generator.pages import write  # noqa: E402

import equivcheck  # noqa: E402

project = "equivcheck"
author = "the equivcheck developers"
copyright = "2026, the equivcheck developers"
version = release = equivcheck.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "equivcheck"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

write(HERE / "generated")

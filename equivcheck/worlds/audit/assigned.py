"""Finds persistent variables assigned by a module's functions.

They are globals and attributes of modules, classes, functions and objects. The search reads compiled code, so it does not matter
which functions have run or are wrapped.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

_GLOBALS = ("STORE_GLOBAL", "DELETE_GLOBAL")
_ATTRIBUTES = ("STORE_ATTR", "DELETE_ATTR")
_OPCODES = frozenset(dis.opmap[name] for name in _GLOBALS + _ATTRIBUTES)
_BETWEEN = ("CACHE", "PUSH_NULL", "NOP", "SWAP", "EXTENDED_ARG")
"""Instructions allowed between loading an attribute's owner and the assignment."""

Chain = tuple[str, ...]
"""Value that was loaded last: `_GLOBAL` or `_LOCAL`, a name, and attributes of that name. Empty for other values."""
_GLOBAL, _LOCAL = "global", "local"


def assigned_variables(module: ModuleType) -> Iterator[tuple[Any, str]]:
    """Yield variables assigned by functions in `module`, each as its owning object and its name.

    Variables local to a call are left out.
    """
    for code in _nested(_code(module)):
        if not _OPCODES.isdisjoint(code.co_code[::2]):
            for chain, name in _assignments(code):
                owner = module if chain == (_GLOBAL,) else _owner(chain, code, module)
                if owner is not None:
                    yield owner, name


def _code(module: ModuleType) -> CodeType | None:
    """Return the code that runs when the module is imported; None if unknown, as for modules in C++."""
    read = getattr(getattr(module.__spec__, "loader", None), "get_code", None)
    return read(module.__name__) if read is not None else None


def _nested(code: CodeType | None) -> Iterator[CodeType]:
    """Yield the code objects of functions and class bodies."""
    for constant in () if code is None else code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _assignments(code: CodeType) -> Iterator[tuple[Chain, str]]:
    """Yield the owner chain and the attribute name for each assignment."""
    chain: Chain = ()
    copied: Chain = ()
    for instruction in dis.get_instructions(code):
        operation, argument = instruction.opname, instruction.argval
        if operation in _GLOBALS:
            yield (_GLOBAL,), argument
        elif operation in _ATTRIBUTES:
            yield chain or copied, argument
        elif operation == "COPY":  # copies `owner` in `owner.name += value`
            copied = chain
        elif operation not in _BETWEEN:
            chain = _loaded(operation, argument, chain)


def _loaded(operation: str, argument: Any, chain: Chain) -> Chain:
    if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
        return _GLOBAL, argument
    if operation.startswith(("LOAD_FAST", "STORE_FAST_LOAD_FAST", "LOAD_DEREF")):
        return _LOCAL, argument[-1] if isinstance(argument, tuple) else argument
    if operation == "LOAD_ATTR" and chain:
        return *chain, argument
    return ()


def _owner(chain: Chain, code: CodeType, module: ModuleType) -> Any:
    """Return the owner object; None if the function created the object or got it as an argument."""
    match chain:
        case ("global", name, *path):
            return _resolved(vars(module).get(name), path)
        case ("local", "cls", *path) | ("local", "self", "__class__", *path):
            return _resolved(module, [*code.co_qualname.split(".")[:-1], *path])
    return None


def _resolved(owner: Any, path: list[str]) -> Any:
    for name in path:
        owner = getattr(owner, name, None)
    return owner

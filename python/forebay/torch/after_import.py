"""Functions that run right after the import of a module, because importing it here would cost programs that do not use it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from types import ModuleType
from typing import Any, Callable, Dict

_lessons: Dict[str, Callable[[ModuleType], None]] = {}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _lessons:
            return None
        teach = _lessons.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            teach(module)

        spec.loader.exec_module = exec_module
        return spec


_finder = _Finder()


def after_import(name: str, teach: Callable[[ModuleType], None]) -> None:
    """Calls `teach` with the module `name`: now if it is imported, else after its import."""
    if name in sys.modules:
        teach(sys.modules[name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _lessons[name] = teach

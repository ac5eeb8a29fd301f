"""Conformance checks for the entries of registries (adapters, matchers, metrics, …), built-in or of a plugin.

Calling a check runs all of its parts, ``check_metric("linear_cka")``, and raises an ``AssertionError`` that names what
is violated; :func:`parametrize_with_checks` makes one test of pytest for each part. Networks have no check:
``check_adapter`` tests networks of any class. Public names, listed in ``__init__.pyi``, are imported when they are
first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

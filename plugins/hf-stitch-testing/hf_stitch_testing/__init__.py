"""Conformance checks for registry entries (adapters, matchers, metrics, …), built-in or from plugins.

Calling a check, such as ``check_metric("linear_cka")``, runs all of its parts and raises an ``AssertionError`` that
describes the violation. :func:`parametrize_with_checks` creates one pytest test for each part. ``check_adapter`` tests
networks of any class. Public names (see ``__init__.pyi``) are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

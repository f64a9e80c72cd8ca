"""Tests, and programs that look for mistakes; a package, so that no installed `tests` hides it."""

"""Small changes to the C++ sources, each of which some test must notice.

    python -m tests.mutants.cpp [--seed N] [--count 40] [--files REGEX]

Prints for each mutant of a random sample whether it was killed, and ends with the share that was. A
mutant that does not compile is not counted, nor is one that is listed as equivalent.
"""

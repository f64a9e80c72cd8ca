"""The parameter server's speed: its core alone, and whole beside other ways."""

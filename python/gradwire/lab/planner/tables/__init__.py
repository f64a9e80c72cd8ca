"""Tables of well-known networks, with the shapes that their papers give."""

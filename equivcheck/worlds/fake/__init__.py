"""World ``fake``: one rank of a world with any size. The other ranks do not exist, and no real data is exchanged."""

"""Every operation of tensor programs under every placement of its arguments on small meshes, and on results of the others."""

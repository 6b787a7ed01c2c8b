"""Every operation of tensor programs under every placement of its arguments on small meshes."""

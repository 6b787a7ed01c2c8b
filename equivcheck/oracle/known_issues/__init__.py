"""Known issues of torch, and the evidence by which a failing check is recognised as a known issue."""

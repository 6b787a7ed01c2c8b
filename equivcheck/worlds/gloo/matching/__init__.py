"""Collectives of gloo ranks, compared before they are issued: gloo itself adds up whatever bytes it is given."""

"""Compares collectives on gloo ranks before they are issued, because gloo itself adds up any bytes."""
